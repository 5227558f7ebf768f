#!/usr/bin/env bash
# All that a GPU can show, meant to take under ten minutes on one H200: correctness in slices; dense against all methods
# at 300, 1000 and 4000 visual tokens; decode with and without CUDA graphs, in a slice and in all layers (whose graphs
# may take GRAPHS seconds to compile and run, or are left out). Ends with one table of all; everything goes to OUT too.
# Smaller, on any machine: SHAPE=tiny LAYERS=8 VISUAL="16 36" ROUNDS=1 TOKENS=2 benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
shape=${SHAPE:-qwen3-vl-30b-a3b} layers=${LAYERS:-48} visual=${VISUAL:-300 1000 4000}
rounds=${ROUNDS:-3} tokens=${TOKENS:-16} out=${OUT:-gpu-bench.md} python=${PYTHON:-.venv/bin/python}
slice=$((layers < 6 ? layers : 6))
exit=$((layers * 28 / 48)) deep=$((slice / 2)) experts=${PREFIX:-35}
[ "$shape" = tiny ] && experts=${PREFIX:-6}
said() { echo "\`decomoe bench --shape $shape $*\`"; echo; }
bench() { said "$@"; "$python" -m decomoe bench --shape "$shape" "$@"; echo; }
timing=(--text 80 --rounds "$rounds" --new-tokens "$tokens" --skew "${SKEW:-1}")

{
  echo "## Correct against fp32, $slice layers"
  for dtype in float32 bfloat16; do
    bench --check --layers "$slice" --dtype "$dtype" --visual 64 --methods \
      "decomoe:exit_after=$deep,rcep=no" "decomoe:exit_after=$deep,prefix=$experts" \
      "decomoe:exit_after=$deep,prefix=$experts@decomoe_loop" "decomoe:exit_after=$deep,prefix=$experts@decomoe_all" \
      --compile dense "decomoe:exit_after=$deep,p=0.7" "decomoe:exit_after=$deep,p=0.7,outside=drop"
  done
  for count in $visual; do
    echo "## $count visual tokens"
    bench --layers "$layers" --visual "$count" "${timing[@]}" --methods dense off decomoe \
      "decomoe:exit_after=$exit,rcep=no" "decomoe:exit_after=$exit,prefix=$experts,picture=stays" \
      "decomoe:exit_after=$exit,prefix=$experts" "decomoe:exit_after=$exit,prefix=$experts,outside=drop" \
      fastv sparsevlm dyvte fastmmoe vtw modes:tau_text=0.001,tau_visual=0.001
  done
  echo "## Decode with and without CUDA graphs, $slice layers"
  graphs=("decomoe:exit_after=$deep,p=0.7" "decomoe:exit_after=$deep,p=0.7,outside=drop")
  bench --layers "$slice" --visual 300 "${timing[@]}" --methods dense "${graphs[@]}" --compile dense "${graphs[@]}"
  echo "## Decode with CUDA graphs, all $layers layers"
  whole=(--layers "$layers" --visual 300 "${timing[@]}" --methods dense --compile dense "decomoe:exit_after=$exit,p=0.7")
  said "${whole[@]}"
  timeout "${GRAPHS:-240}" "$python" -m decomoe bench --shape "$shape" "${whole[@]}" || echo "Left out: status $?."
} | tee "$out"
{
  echo "## In one table"
  "$python" -m decomoe bench --show "$out"
} | tee -a "$out"
