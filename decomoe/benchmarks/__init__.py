"""Benchmarks, one a file: load, prompt, score. `BENCHMARKS` is the table that the command line reads."""

from .a_okvqa import A_OKVQA
from .ai2d import AI2D
from .base import Benchmark, Case, exact, normalize
from .drawn import DRAWN
from .easy_vqa import EASY_VQA
from .hallusionbench import HALLUSIONBENCH
from .mmbench import MMBENCH
from .mme import MME
from .mmmu import MMMU
from .photos import PHOTOS
from .pope import POPE
from .run import Outcome, run, run_batch
from .scienceqa import SCIENCEQA

OURS = (*DRAWN, EASY_VQA, PHOTOS)  # small pictures, for the mini model
OTHERS = (MMBENCH, SCIENCEQA, AI2D, A_OKVQA, MMMU, HALLUSIONBENCH, POPE, MME)
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in (*OURS, *OTHERS)}

__all__ = ["BENCHMARKS", "Benchmark", "Case", "Outcome", "exact", "normalize", "run", "run_batch"]
