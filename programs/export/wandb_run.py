"""A run of Weights & Biases for `cohort export --to wandb:PROJECT`, by its own client. On stdin come lines of JSON: what
wandb.init takes, then values, configurations, and the end. Says "run PLACE" and "done", or what is wrong."""

import json
import os
import sys


def main():
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    init = json.loads(sys.stdin.readline())
    if os.environ.get("WANDB_DIR"):
        del init["dir"]
    try:
        import wandb

        run = wandb.init(**init, resume="allow", settings=wandb.Settings(silent=True, console="off"))
        out.write(f"run {run.url or run.dir}\n")
        late, first = 0, ""
        for line in sys.stdin:
            said = json.loads(line)
            if "config" in said:
                run.config.update(said["config"], allow_val_change=True)
            elif "values" in said:
                if said["step"] >= max(run.step, run.starting_step):
                    run.log(said["values"], step=said["step"])
                elif said["step"] >= run.starting_step:  # (what is before the first step of a run that goes on is there)
                    late += len(said["values"])
                    first = first or f"{next(iter(said['values']))} of step {said['step']} after step {run.step}"
            else:
                if said["preempting"]:
                    run.mark_preempting()
                run.finish(exit_code=said["end"])
                out.write(f"done, without {late} value{'s'[:late != 1]} that came late, first {first}\n" if late else "done\n")
                return
    except BaseException as error:
        out.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
    os._exit(1)  # without the run's end: who fed it is gone


if __name__ == "__main__":
    main()
