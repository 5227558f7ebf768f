#!/usr/bin/env bash
# All that this folder shows, for any model, in one command: methods at equal cost, their answers, routing, forced exits
# and times, and from them figures, tables and cases. Run again, it goes on where it was stopped.
#
#   analysis/run.sh OUT [--model ID] [--calibration FOLDER] [--device DEVICE]
#
# The environment may set BENCHMARKS ("drawn easy-vqa"), LIMIT (questions of each that are answered, 64), OBSERVE (of
# each that are observed, LIMIT), MATCH (calibration questions on which costs are made equal, "drawn:64 easy-vqa:32") and
# PICTURES (questions about few pictures, to find cases, 200).
set -euo pipefail
out=${1:?"usage: analysis/run.sh OUT [--model ID] [--calibration FOLDER] [--device DEVICE]"}
model=("${@:2}")
read -ra benchmarks <<<"${BENCHMARKS:-drawn easy-vqa}"
read -ra match <<<"${MATCH:-drawn:64 easy-vqa:32}"
limit=${LIMIT:-64} pictures=${PICTURES:-200}
observed=${OBSERVE:-$limit}
PATH="$(cd "$(dirname "$0")/.." && pwd)/.venv/bin:$PATH"

mkdir -p "$out"
if [ ! -s "$out/match.txt" ]; then
  decomoe match --methods fastv sparsevlm vtw fastmmoe --data "${match[@]}" "${model[@]}" | tee "$out/match.tmp"
  mv "$out/match.tmp" "$out/match.txt"
fi
read -ra methods < <(tail -n 1 "$out/match.txt") # "--methods", and decomoe first
asked=(--benchmarks "${benchmarks[@]}" --out "$out" "${model[@]}")
decomoe evaluate "${asked[@]}" --limit "$limit" "${methods[@]}" dyvte modes table2 table5 table6
decomoe collect "${asked[@]}" --limit "$observed" "${methods[@]}" dyvte modes
decomoe collect --benchmarks drawn-pictures --limit "$pictures" --collectors exits --out "$out/cases" "${model[@]}"
decomoe figures --results "$out" --out "$out/figures"
decomoe cases --benchmarks drawn-pictures --results "$out/cases" --out "$out/figures"
