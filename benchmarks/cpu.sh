#!/usr/bin/env bash
# What the README shows under Performance, measured anew on this machine's CPU, as Markdown into OUT (cpu-bench.md, and
# the rows as JSON into cpu-bench.jsonl): the mini model, plain and compiled, on the CPU time of one thread; then six
# layers at the real widths, which take 15 GB and some minutes a round.
# Smaller: SHAPE=tiny LAYERS=6 VISUAL=64 ROUNDS=1 benchmarks/cpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
shape=${SHAPE:-qwen3-vl-30b-a3b} layers=${LAYERS:-6} visual=${VISUAL:-1000} experts=35 out=${OUT:-cpu-bench.md}
[ "$shape" = tiny ] && experts=6
python=${PYTHON:-.venv/bin/python} fixed=decomoe:exit_after=9,p=0.7 half=decomoe:exit_after=$((layers / 2 - 1))
said() { for word; do [[ $word == *\ * ]] && word="\"$word\""; printf ' %s' "$word"; done; }
bench() { echo "\`decomoe bench$(said "$@")\`"; echo; "$python" -m decomoe bench "$@"; echo; }
mini() { OMP_NUM_THREADS=1 bench --cpu-time "$@"; }
wide() { bench --shape "$shape" --layers "$layers" --visual "$visual" --text 64 --new-tokens 4 "$@"; }

{
  echo "## The mini model, 256 visual tokens"
  mini --rounds "${ROUNDS:-60}" --methods dense off dense@decomoe decomoe "$fixed"
  mini --rounds "${ROUNDS:-20}" --methods dense --compile dense decomoe "$fixed"
  mini --rounds "${ROUNDS:-10}" --methods dense decomoe "$fixed" --breakdown
  one() { mini --rounds "${ROUNDS:-20}" --methods dense decomoe --image "assets/examples/$1" --question "$2"; }
  one shape.png "is there a blue shape in the image?"
  one chart.png "Which bar is the tallest?"
  echo "## $layers layers of $shape, $visual visual tokens"
  wide --rounds "${ROUNDS:-3}" --methods dense dense@decomoe "$half,rcep=no" "$half,prefix=$experts,picture=stays" \
    "$half,prefix=$experts" "$half,p=0.7,outside=drop"
} | tee >(grep '^\[{' >"${out%.md}.jsonl") | grep --line-buffered -v '^\[{' | tee "$out"
