"""The Space: the page on the mini model."""

from decomoe import load
from decomoe.ui.page import serve

if __name__ == "__main__":
    serve(load())
