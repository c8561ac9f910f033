#!/usr/bin/env bash
# Sets up .venv, then runs the default job: a small model learns sums. Prints its held-out accuracy before and after.
#
#   bash scripts/quickstart.sh                          # about ten minutes on two cores, set-up included
#   bash scripts/quickstart.sh reward.shuffle=true      # arguments go to train.py: a control, in a folder of its own
#   bash scripts/quickstart.sh +recipe=quickstart_async # another recipe in place of the default one
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$REPO"

start=$(now)
bash scripts/setup.sh

# An experiment of its own (reward.shuffle=true) gets a folder of its own, named after what differs.
recipe=(+recipe=quickstart)
slug=
for argument in "$@"; do
    [[ $argument != recipe=* && $argument != +recipe=* ]] || recipe=()
    slug+="_${argument//[^A-Za-z0-9.]/-}"
done
if [[ -n $slug && ${#recipe[@]} -gt 0 && " $*" != *" run.dir="* && " $*" != *" run.name="* ]]; then
    recipe+=("run.name=quickstart${slug:0:80}")
fi

say "training: python train.py" "${recipe[@]}" "$@"
training=$(now)
code=0
"$PYTHON" train.py "${recipe[@]}" "$@" || code=$?
say "training: $(seconds_since "$training") s"
if ((code == 0)); then
    "$PYTHON" scripts/summarize_run.py "${recipe[@]}" "$@" || code=$?
else
    say "train.py ended with exit code $code" >&2
fi
say "total, set-up included: $(seconds_since "$start") s"
exit "$code"
