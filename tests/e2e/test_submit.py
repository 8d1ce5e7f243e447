"""`cohort submit` without a Slurm: the script, and fake commands that record what they got. (A real Slurm:
tests/cluster/test_submit.py.)"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

COHORT = os.environ["COHORT_COMMAND"]
PATIENCE = 60
# The rank that fails first ends the other: both have said their line by then.
SAY_AND_EXIT = "echo rank $RANK of $WORLD_SIZE; : >said.$RANK; until [ -e said.0 ] && [ -e said.1 ]; do sleep 0.1; done; exit "


class Submit(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-submit-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        (self.folder / "bin").mkdir()
        for tool in ("sh", "bash", "cat", "setsid", "sleep"):  # and no Slurm of this machine's
            (self.folder / "bin" / tool).symlink_to(shutil.which(tool))

    def fake(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\nexport D={self.folder}\n" + text)
        path.chmod(0o755)

    def words(self, *words, **options):
        options.setdefault("env", {"PATH": f"{self.folder}/bin", "HOME": str(self.folder)})
        return dict(args=[COHORT, "submit", *words], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, text=True, **options)

    def submit(self, *words, status=0):
        done = subprocess.run(**self.words(*words), timeout=PATIENCE, check=False)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done

    def script(self, *words):
        done = self.submit("--dry-run", *words)
        self.assertFalse((self.folder / "runs").exists(), "a dry run writes nothing")
        text = done.stdout.replace(str(self.folder), "DIR").replace(COHORT, "cohort")
        self.assertEqual(subprocess.run(["bash", "-n"], input=text, text=True, check=False, timeout=PATIENCE).returncode, 0, text)
        return text

    def test_the_script_for_slurm(self):
        text = self.script("--nodes", "2", "--ntasks-per-node", "4", "--gpus-per-node=4", "-c", "8", "--time",
                           "1-0", "-p", "gpu", "-A", "me", "--sbatch=--constraint=a100", "--sbatch=--mem=0", "--max-restarts", "2",
                           "--env", "A=b c", "--as-horovod", "train me.py", "--lr", "0.1", "--nodes", "7")
        self.assertEqual(text.split("cd DIR")[0], """#!/bin/bash
#SBATCH --job-name=train_me
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=1-0
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --output=DIR/runs/NAME/output.txt
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --constraint=a100
#SBATCH --mem=0
""")
        command = re.search(r"(?m)^cohort run .*$", text).group()
        self.assertIn("cohort run --run-dir DIR/runs/NAME ", command)
        for words in ("--max-restarts 2", "--env 'A=b c'", "--as-horovod"):
            self.assertIn(f" {words} ", command)
        self.assertTrue(command.endswith(" -- 'train me.py' --lr 0.1 --nodes 7 &"), command)
        self.assertIn("scontrol requeue", text)

    def test_no_signal_in_a_short_time(self):
        for time_limit, signalled in (("9", False), ("10", True), ("9:59", False), ("0:10:00", True), ("1-0", True)):
            text = self.script("--time", time_limit, "-np", "3", "--", "./train", "-np", "4")
            self.assertEqual("--signal" in text, signalled, time_limit)
            self.assertIn("#SBATCH --ntasks=3\n", text)
            self.assertIn("-- ./train -np 4 &", text)

    def test_words_stay_words(self):
        odd = ["two words", "it's", 'a "b"', "$HOME `id` \\", "line\nbreak", "@nodes@", "", "*"]
        text = self.script("-A", "my account", "--run-dir", "50%j", "./show", *odd)
        self.assertIn("#SBATCH --account='my account'\n", text)
        self.assertIn("#SBATCH --output=DIR/50%%j/output.txt\n", text)
        words = re.search(r"(?s) -- \./show (.*?) &\n", text).group(1)
        shown = subprocess.run(["bash", "-c", f"printf '%s\\0' {words}"], stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE)
        self.assertEqual(shown.stdout.split("\0")[:-1], odd)
        said = self.submit("--dry-run", "--sbatch=--mem=0\nrm -r x", "./train", status=2).stderr
        self.assertIn("no line break", said)

    def test_a_value_is_what_was_typed_though_it_looks_like_an_option(self):
        script = self.submit("--dry-run", "--sbatch", "--nice=10", "./train", "--lr=1").stdout
        self.assertIn("--nice=10", script)
        self.assertIn("./train --lr=1", script)
        for words, why in ((("--sbatch", "--", "./train"), "--sbatch wants a value"), (("--sbatch=time=10", "./train"), "begin with -")):
            self.assertIn(why, self.submit("--dry-run", *words, status=2).stderr)

    def test_options_of_sbatch_that_would_undo_the_script(self):
        for option, instead in (("--output=x", "--run-dir DIR"), ("-ox", "--run-dir DIR"), ("--outp x", "--run-dir DIR"),
                                ("-e", "in output.txt"), ("--error=x", "in output.txt"), ("--open-mode=truncate", "goes on with"),
                                ("-a0-3", "submit each"), ("--array=0-3", "submit each"), ("-W", "leave it out"),
                                ("--wait", "leave it out"), ("-t5", "--time without"), ("--time=5", "--time without"),
                                ("--signal=USR1@60", "=B:SIGNAL"), ("--signal", "=B:SIGNAL")):
            said = self.submit("--dry-run", f"--sbatch={option}", "./train", status=2).stderr
            self.assertIn(f"--sbatch {option}: ", said)
            self.assertIn(instead, said)
        kept = ("--signal=B:USR1@600", "--signal=RB:USR1@600", "--no-requeue", "--time-min=5", "--wait-all-nodes=1", "--ntasks=2")
        text = self.script(*(f"--sbatch={option}" for option in kept), "./train")
        for option in kept:
            self.assertIn(f"#SBATCH {option}\n", text)

    def test_ranks_on_one_node_are_those_that_were_asked_for(self):
        for words, ranks in ((("-np", "3"), 3), (("-np3",), 3), (("-n=3",), 3), (("--ntasks_per_node", "4"), 4), ((), 1), (("--sbatch=--ntasks=5",), None),
                             (("--sbatch=-N2",), None), (("--sbatch=--nodelist=a",), 1), (("--nodes", "2", "-np", "3"), None)):
            command = re.search(r"(?m)^cohort run .*$", self.script(*words, "./train")).group()
            found = re.search(r" -np (\d+) ", command)
            self.assertEqual(found and int(found.group(1)), ranks, (words, command))

    def test_a_template_of_the_site(self):
        own = self.folder / "own.sh"
        own.write_text("#!/bin/bash\n#SBATCH -N @nodes@ --exclusive\n#SBATCH -A @account@\nmodule load cuda # me@host\n@command@\n")
        self.assertRegex(self.script("--template", str(own), "./train"),
                         r"^#!/bin/bash\n#SBATCH -N 1 --exclusive\nmodule load cuda # me@host\ncohort run .* -- ./train\n$")
        own.write_text("@nodez@\n")
        self.assertIn("there is no @nodez@; there are account, ",
                      self.submit("--dry-run", "--template", str(own), "./train", status=2).stderr)

    def test_what_cannot_be_meant(self):
        for words, said in (((), "no program"), (("--nodez", "2", "./train"), "did you mean --nodes?"),
                            (("--time", "soon", "./train"), "--time soon: minutes,"), (("--nodes", "0", "./train"), "--nodes"),
                            (("--scheduler", "lsf", "./train"), "has no option --scheduler; sbatch's own: --sbatch=OPTION"),
                            (("-mca", "a", "b", "./train"), "has no option -mca; "), (("--nodes",), "--nodes wants a value"),
                            (("--grace", "1", "--grace", "2", "./train"), "--grace is given twice, with 1 and 2"),
                            (("-np4", "-n", "2", "./train"), "-np is given twice, with 4 and 2"),
                            (("--nodes", "3", "-N2", "./train"), "--nodes is given twice, with 3 and 2"),
                            (("--quiet=x", "./train"), "--quiet: true or false is wanted"),
                            (("--follow", "12"), "no run in ./runs was submitted")):
            self.assertIn(said, self.submit(*words, status=2).stderr)
        said = self.submit("./train", status=1).stderr
        self.assertIn("there is no sbatch in PATH", said)
        self.assertIn("docs/reference/submit.md", said)
        self.assertFalse((self.folder / "runs").exists())

    def test_a_job_and_its_record(self):
        # It may have run before its number is known.
        self.fake("sbatch", 'echo "sbatch $*" >>$D/calls\n'
                            """setsid sh -c 'bash "$2" >>"${2%/*}/output.txt" 2>&1; echo $? >$D/status' sh "$@" >/dev/null 2>&1 &\n"""
                            "while [ ! -s $D/status ]; do sleep 0.1; done\necho 12\n")
        self.fake("scontrol", 's=RUNNING; [ -e $D/status ] && s=FAILED; echo "JobState=$s ExitCode=$(cat $D/status):0"\n')
        done = self.submit("--ntasks-per-node", "2", "--env", "X=1", "--", "sh", "-c", SAY_AND_EXIT + "3", status=3)
        for rank in range(2):
            self.assertIn(f"rank {rank} of 2", done.stdout)
        self.assertIn("#SBATCH --ntasks-per-node=2\n", done.stderr)  # the script is shown
        self.assertIn("cohort: job 12: FAILED\n", done.stderr)
        run = (self.folder / "runs/latest").resolve()
        self.assertEqual((self.folder / "calls").read_text(), f"sbatch --parsable {run}/submit.sh\n")
        self.assertEqual(json.loads((run / "submit.json").read_text())["job"], "12")
        self.assertEqual(json.loads((run / "job.json").read_text())["exit_status"], 3)
        self.assertIn("rank 1 of 2", self.submit("--follow", "12", status=3).stdout)
        # One that has forgotten the job: the run's own record says how it ended.
        self.fake("scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1\n")
        self.assertIn("job 12: gone\n", self.submit("--follow", str(run), status=3).stderr)

    def test_a_refused_requeue(self):
        script = self.folder / "script"
        for refused, status in ((0, 0), (1, 75)):
            self.fake("scontrol", f"echo requeue $2; exit {refused}\n")
            text = self.script("sh", "-c", "exit 75")
            script.write_text(text.replace("DIR", str(self.folder)).replace("cohort run", f"{COHORT} run").replace("/runs/NAME", "/run"))
            done = subprocess.run(["bash", script], timeout=PATIENCE, check=False, capture_output=True, text=True,
                                  env={"PATH": f"{self.folder}/bin", "HOME": str(self.folder), "SLURM_JOB_ID": "7"})
            self.assertEqual(done.returncode, status, done.stdout + done.stderr)
            self.assertIn("requeue 7\n", done.stdout)

    def test_a_job_that_is_cancelled_does_not_come_back(self):
        script = self.folder / "script"
        self.fake("scontrol", 'case $1 in -o) echo "JobId=$4 JobState=CANCELLED Reason=None";; *) echo requeued;; esac\n')
        text = self.script("sh", "-c", "exit 75")
        script.write_text(text.replace("DIR", str(self.folder)).replace("cohort run", f"{COHORT} run").replace("/runs/NAME", "/run"))
        done = subprocess.run(["bash", script], timeout=PATIENCE, check=False, capture_output=True, text=True,
                              env={"PATH": f"{self.folder}/bin", "HOME": str(self.folder), "SLURM_JOB_ID": "7"})
        self.assertEqual(done.returncode, 75, done.stdout + done.stderr)
        self.assertNotIn("requeued", done.stdout)

    def test_a_job_of_another_cluster(self):
        self.fake("sbatch", "echo '4711;b'; echo ----\n")
        for tool, answer in (("scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"), ("sacct", "echo 'FAILED|3:0'")):
            self.fake(tool, f'echo "{tool} $*" >>$D/asked\n{answer}\n')
        done = self.submit("--sbatch=--clusters=b", "./train", status=3)
        self.assertIn("cohort: job 4711;", done.stderr)
        self.assertEqual((self.folder / "asked").read_text(),
                         "scontrol -M b -o show job 4711\nsacct -M b -X -n -P -o State,ExitCode -j 4711\n")
        self.assertIn("job 4711 ended with status 3", self.submit("--follow", "4711", status=3).stderr)

    def test_a_folder_that_has_an_output(self):
        self.fake("sbatch", "echo 7; echo of job $$ >>$D/run/output.txt\n")
        self.fake("scontrol", "echo JobState=COMPLETED ExitCode=0:0\n")
        first, second = (self.submit("--run-dir", "run", "./train").stdout for _ in range(2))
        self.assertRegex(first, "^of job [0-9]+\n$")
        self.assertRegex(second, "^of job [0-9]+\n$")
        self.assertNotEqual(first, second)

    def test_the_schedulers_own_words(self):
        self.fake("sbatch", 'echo "sbatch: error: invalid partition specified: gpuu" >&2; exit 1\n')
        said = self.submit("-p", "gpuu", "./train", status=1).stderr
        self.assertIn("invalid partition specified: gpuu", said)
        self.assertIn("`sinfo -s`", said)
        self.assertTrue(pathlib.Path(re.search(r"the script is (\S+)", said).group(1)).exists())

    def test_following_is_ended_and_the_job_is_not(self):
        self.fake("sbatch", "echo 'sbatch: remark' >&2; echo '4711;cluster'; echo 'sbatch: later remark' >&2\n")
        self.fake("scontrol", "echo JobId=4711 JobState=RUNNING Reason=None ExitCode=0:0\n")
        follower = subprocess.Popen(**self.words("./train"))
        said = ""
        while "job 4711: RUNNING" not in said:
            line = follower.stderr.readline()
            self.assertTrue(line, said)
            said += line
        follower.send_signal(signal.SIGINT)
        _, rest = follower.communicate(timeout=PATIENCE)
        self.assertEqual(follower.returncode, 130)
        self.assertIn("cohort submit --follow 4711", rest)
        self.assertIn("scancel -M cluster 4711", rest)
        self.assertIn("sbatch: remark", said)
        # Neither by one that waits for a scheduler, which says nothing of whether it has taken the job.
        self.fake("sbatch", "echo >$D/asked; sleep 1000\n")
        submitting = subprocess.Popen(**self.words("./train"))
        while not (self.folder / "asked").exists():
            self.assertIsNone(submitting.poll())
            time.sleep(0.05)
        submitting.send_signal(signal.SIGINT)
        self.assertIn("sbatch was interrupted: the job may be queued all the same", submitting.communicate(timeout=PATIENCE)[1])
        self.assertEqual(submitting.returncode, 130)
        self.fake("sbatch", "echo 4711\n")
        self.fake("scontrol", "echo >$D/asked_for; sleep 1000\n")
        follower = subprocess.Popen(**self.words("./train"))
        while not (self.folder / "asked_for").exists():
            self.assertIsNone(follower.poll())
            time.sleep(0.05)
        follower.send_signal(signal.SIGINT)
        began = time.monotonic()
        self.assertIn("cohort submit --follow 4711", follower.communicate(timeout=PATIENCE)[1])
        self.assertEqual(follower.returncode, 130)
        self.assertLess(time.monotonic() - began, 15)  # it waits 30 s for an answer
        # And by nobody from the beginning.
        self.assertIn("job 4711;", self.submit("--no-follow", "./train").stderr)

    def test_slurms_states(self):
        self.fake("sbatch", "echo 7\n")
        self.fake("scontrol", 'cat $D/live 2>/dev/null || { echo slurm_load_jobs error: Invalid job id specified >&2; exit 1; }\n')
        self.fake("sacct", "cat $D/kept\n")
        live, kept = self.folder / "live", self.folder / "kept"
        for state, code, status in (("COMPLETED", "0:0", 0), ("FAILED", "3:0", 3), ("FAILED", "0:9", 137), ("CANCELLED", "0:15", 143),
                                    ("CANCELLED", "1:0", 143), ("TIMEOUT", "0:0", 124), ("NODE_FAIL", "0:0", 1)):
            live.write_text(f"JobId=7 JobState={state} Reason=None Requeue=1 ExitCode={code} DerivedExitCode=0:0\n")
            self.submit("./train", status=status)
        live.unlink()
        kept.write_text("CANCELLED by 0|0:15\n")
        self.submit("./train", status=143)
        (self.folder / "bin/scontrol").unlink()
        self.assertRegex(self.submit("./train", status=1).stderr, "job 7 cannot be followed here, and goes on: .*scontrol")
        self.fake("scontrol", "[ -e $D/asked ] && { echo JobState=COMPLETED ExitCode=0:0; exit; }\n"
                              "echo >$D/asked; echo 'Unable to contact slurm controller' >&2; exit 1\n")
        self.assertIn("job 7: state is not known now: Unable to contact slurm controller\n", self.submit("./train").stderr)
        self.fake("scontrol", 'echo slurm_load_jobs error: Invalid job id specified >&2; exit 1\n')
        kept.write_text("")  # no accounting, and no record
        self.assertIn("does not say how it ended", self.submit("./train", status=1).stderr)


if __name__ == "__main__":
    unittest.main()
