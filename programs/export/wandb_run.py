"""A run of Weights & Biases for `cohort export --to wandb:PROJECT`, by its own client. Reads lines of JSON from
stdin: arguments of wandb.init, then values, configurations, and the end. Prints "run PLACE" and "done", or the error."""

import json
import os
import sys


def main():
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that other output is not read as an answer
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
                elif said["step"] >= run.starting_step:  # (a continued run already has earlier steps)
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
    os._exit(1)  # without ending the run: the parent process has ended


if __name__ == "__main__":
    main()
