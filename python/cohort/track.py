"""What a training run leaves behind for people: its record, a picture of its curves, and a progress bar.

Rank 0 makes them; other ranks make none.

    record = cohort.track.RunRecord("out/run.jsonl", program="digits", world_size=cohort.size(), parameters={"lr": 0.1})
    record.observe(cohort.world())
    record.write("step", step=step, epoch=1.25, train_loss=loss)
    ...
    record.write_communication()
    cohort.track.plot("out/run.jsonl", "out/curves.svg")

**RunRecord(file, *, program="", world_size=1, parameters={})** is one file of JSON lines per run, whose schema is
docs/reference/run-record.md; C++ writes the same. It makes the file's folder, goes on in an existing file (a resumed run),
and writes a `start` line. Raises Io, naming the path, and Unavailable if another process writes to the file. Any thread.

write(event, **fields)   appends a line: numbers (also of NumPy and torch), texts, truth values, paths. It is in the kernel's
                         hands on return; a full disk raises Io and leaves the file as it was
write_communication()    appends what `observe` has seen since the last time: number, bytes and seconds of each operation,
                         seconds waited for peers, steps. Nothing if nothing was seen
observe(world)           what this Communicator does from now on is added up
step(step, samples, seconds, exposed_communication_seconds=0.0)
                         one step as the training loop saw it; `samples` of all ranks
file                     its path

**plot(record_file, svg_file)** draws the curves, as `cohort plot`. Raises Unavailable, Io, or Corrupt for what is no record.

**Progress(*, steps_per_epoch=0, epochs=0, first_step=0, first_epoch=0, steps_left_in_first_epoch=None, terminal=None,
interval=None)** is a bar on stdout: one line that is drawn over on a terminal, plain lines elsewhere (`terminal` says which
it is), at most one for each `interval` seconds (0.1, or 2). A run that resumes another says how many steps and whole
epochs were done, and on another number of ranks also how many steps its first epoch has left. For the training loop's
thread.

update(step, loss, samples)  after each step: steps done in all, the latest loss, samples of this step over all ranks
skip_time()                  leaves the time since the last step out of the speed: it was an evaluation or a checkpoint
line(text)                   a line that stays, above the bar
finish()                     takes the bar away
"""

from cohort._core import Progress, RunRecord, plot

__all__ = ["Progress", "RunRecord", "plot"]
