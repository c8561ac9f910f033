#!/usr/bin/env bash
# Sets up .venv, then runs the default job: a small model learns sums. Prints its held-out accuracy before and after.
#
#   bash scripts/quickstart.sh                          # about ten minutes on two cores, set-up included
#   bash scripts/quickstart.sh run.dir=runs/other       # arguments go to train.py; paths are relative to the repository
#   bash scripts/quickstart.sh +recipe=quickstart_async # another recipe in place of the default one
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$REPO"

start=$(now)
bash scripts/setup.sh

recipe=(+recipe=quickstart)
for argument in "$@"; do
    [[ $argument != recipe=* && $argument != +recipe=* ]] || recipe=()
done

say "training: python train.py ${recipe[*]} $*"
training=$(now)
code=0
"$PYTHON" train.py "${recipe[@]}" "$@" || code=$?
say "training: $(seconds_since "$training") s"
if ((code == 0)); then
    "$PYTHON" scripts/summarize_run.py --since $((training / 1000000)) "${recipe[@]}" "$@" || code=$?
else
    say "train.py ended with exit code $code" >&2
fi
say "total, set-up included: $(seconds_since "$start") s"
exit "$code"
