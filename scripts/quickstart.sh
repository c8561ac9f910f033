#!/usr/bin/env bash
# Set up .venv and run the default job: a small model learns sums. Prints its held-out accuracy before and after.
#
#   bash scripts/quickstart.sh                          # about ten minutes on two cores, set-up included
#   bash scripts/quickstart.sh reward.shuffle=true      # arguments are passed to train.py: a control run, in its own folder
#   bash scripts/quickstart.sh +recipe=quickstart_async # another recipe
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$REPO"

start=$(now)
bash scripts/setup.sh

# A run with other settings (reward.shuffle=true) gets its own folder, named after them.
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
