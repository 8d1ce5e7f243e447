"""`cohort submit` without a scheduler: the scripts, and fake commands that record what they got. (A real Slurm:
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
TEMPLATES = pathlib.Path(__file__).resolve().parents[2] / "programs/cohort/submit"
PATIENCE = 60
# The rank that fails first ends the other: both have said their line by then.
SAY_AND_EXIT = "echo rank $RANK of $WORLD_SIZE; : >said.$RANK; until [ -e said.0 ] && [ -e said.1 ]; do sleep 0.1; done; exit "


class Submit(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-submit-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        (self.folder / "bin").mkdir()
        for tool in ("sh", "bash", "cat", "head", "setsid", "sleep"):  # and no scheduler of this machine's
            (self.folder / "bin" / tool).symlink_to(shutil.which(tool))

    def fake(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\nexport D={self.folder}\n" + text)
        path.chmod(0o755)

    def fake_start(self, script):
        """Runs the script as a job, which its command does not wait for."""
        return (f"setsid sh -c 'echo >$D/started; PBS_NODEFILE=$D/nodes bash {script}; echo $? >$D/status' sh \"$@\" "
                ">/dev/null 2>&1 &\nwhile [ ! -e $D/started ]; do sleep 0.1; done\n")

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
        text = self.script("--scheduler", "slurm", "--nodes", "2", "--ntasks-per-node", "4", "--gpus-per-node=4", "-c", "8", "--time",
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
            text = self.script("--scheduler", "slurm", "--time", time_limit, "-np", "3", "--", "./train", "-np", "4")
            self.assertEqual("--signal" in text, signalled, time_limit)
            self.assertIn("#SBATCH --ntasks=3\n", text)
            self.assertIn("-- ./train -np 4 &", text)

    def test_words_stay_words(self):
        odd = ["two words", "it's", 'a "b"', "$HOME `id` \\", "line\nbreak", "@nodes@", "", "*"]
        text = self.script("--scheduler", "slurm", "-A", "my account", "--run-dir", "50%j", "./show", *odd)
        self.assertIn("#SBATCH --account='my account'\n", text)
        self.assertIn("#SBATCH --output=DIR/50%%j/output.txt\n", text)
        words = re.search(r"(?s) -- \./show (.*?) &\n", text).group(1)
        shown = subprocess.run(["bash", "-c", f"printf '%s\\0' {words}"], stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE)
        self.assertEqual(shown.stdout.split("\0")[:-1], odd)
        said = self.submit("--dry-run", "--scheduler", "slurm", "--sbatch=--mem=0\nrm -r x", "./train", status=2).stderr
        self.assertIn("no line break", said)

    def test_the_scripts_for_pbs_and_flux(self):
        words = ("--nodes", "2", "--ntasks-per-node", "4", "-c", "2", "--gpus-per-node", "4", "-t", "1:30:05", "-p", "q", "-A", "me", "./train", "x")
        pbs, flux = (self.script("--scheduler", name, *words) for name in ("pbs", "flux"))
        self.assertEqual([line for line in pbs.splitlines() if line.startswith("#PBS")], [
            "#PBS -N train", "#PBS -l select=2:ncpus=8:mpiprocs=4:ngpus=4", "#PBS -l walltime=01:30:05", "#PBS -q q", "#PBS -A me",
            "#PBS -j oe"])
        self.assertIn('cohort run --run-dir DIR/runs/NAME --hostfile "$PBS_NODEFILE" -- ./train x &\n', pbs)
        self.assertEqual([line for line in flux.splitlines() if line.startswith("#flux")], [
            "#flux: --job-name=train", "#flux: --nodes=2", "#flux: --nslots=8", "#flux: --cores-per-slot=2", "#flux: --gpus-per-slot=1",
            "#flux: --time-limit=5405s", "#flux: --queue=q", "#flux: --bank=me"])
        self.assertIn('--per-node 4 -H "$(flux hostlist -e -d , local)" -- ./train x &\n', flux)
        # Options that nobody has given are not in it.
        self.assertEqual([line for line in self.script("--scheduler", "pbs", "./train").splitlines() if line.startswith("#PBS")],
                         ["#PBS -N train", "#PBS -l select=1:ncpus=1:mpiprocs=1", "#PBS -j oe"])

    def test_pbs_is_not_given_keys(self):
        env = {"PATH": f"{self.folder}/bin", "HOME": str(self.folder), "OMP_NUM_THREADS": "3", "WANDB_API_KEY": "123",
               "COHORT_PAGE_TOKEN": "456", "LD_LIBRARY_PATH": "/opt/a b"}
        text = subprocess.run(**self.words("--dry-run", "--scheduler", "pbs", "./train", env=env), timeout=PATIENCE, check=True).stdout
        self.assertEqual([line for line in text.splitlines() if line.startswith("export ")],
                         ["export LD_LIBRARY_PATH='/opt/a b'", "export OMP_NUM_THREADS=3", f"export PATH={self.folder}/bin"])
        self.assertNotIn("-V", text)

    def test_ranks_on_one_node_are_those_that_were_asked_for(self):
        for words, ranks in ((("-np", "3"), 3), (("--ntasks-per-node", "4"), 4), ((), 1), (("--sbatch=--ntasks=5",), None),
                             (("--sbatch=-N2",), None), (("--sbatch=--nodelist=a",), 1), (("--nodes", "2", "-np", "3"), None)):
            command = re.search(r"(?m)^cohort run .*$", self.script("--scheduler", "slurm", *words, "./train")).group()
            found = re.search(r" -np (\d+) ", command)
            self.assertEqual(found and int(found.group(1)), ranks, (words, command))

    def test_a_home_folder_there(self):
        self.fake("ssh", 'shift 2; printf %s "$1" >$D/order; exit 1\n')
        for typed, there in (("~/project", "cd project "), ("~", "cd . "), ("~/", "cd . "), ("~//a/~b", "cd ")):
            self.submit("--login", "me@login", f"--chdir={typed}", "./train", status=1)
            self.assertIn(there, (self.folder / "order").read_text())
            self.assertNotIn("~/", (self.folder / "order").read_text())
        self.assertIn("whose home folder", self.submit("--login", "me@login", "--chdir=~you/project", "./train", status=2).stderr)

    def test_a_template_of_the_site(self):
        own = self.folder / "own.sh"
        own.write_text("#!/bin/bash\n#SBATCH -N @nodes@ --exclusive\n#SBATCH -A @account@\nmodule load cuda # me@host\n@command@\n")
        self.assertRegex(self.script("--scheduler", "slurm", "--template", str(own), "./train"),
                         r"^#!/bin/bash\n#SBATCH -N 1 --exclusive\nmodule load cuda # me@host\ncohort run .* -- ./train\n$")
        own.write_text("@nodez@\n")
        self.assertIn("there is no @nodez@; there are account, ",
                      self.submit("--dry-run", "--scheduler", "slurm", "--template", str(own), "./train", status=2).stderr)

    def test_what_cannot_be_meant(self):
        for words, said in (((), "no program"), (("--nodez", "2", "./train"), "did you mean --nodes?"),
                            (("--time", "soon", "./train"), "--time soon: minutes,"), (("--nodes", "0", "./train"), "--nodes"),
                            (("--scheduler", "pbs", "--nodes", "2", "-np", "3", "./train"), "-np 3 does not go evenly over 2 nodes"),
                            (("--scheduler", "pbs", "--sbatch=-x", "./train"), "--sbatch is of Slurm"),
                            (("--scheduler", "lsf", "./train"), "slurm, pbs or flux"), (("--sync", "./train"), "for --login"),
                            (("--follow", "12"), "no run in ./runs was submitted")):
            where = () if "--scheduler" in words else ("--scheduler", "slurm")
            self.assertIn(said, self.submit(*where, *words, status=2).stderr)
        said = self.submit("./train", status=1).stderr
        self.assertIn("none of sbatch, qsub, flux is in PATH", said)
        self.assertIn("--login", said)

    def test_a_job_of_pbs(self):
        # It may have run before its number is known.
        self.fake("qsub", 'echo "qsub $*" >>$D/calls\n' + self.fake_start('"$1"') + "while [ ! -s $D/status ]; do sleep 0.1; done\necho 12.server\n")
        self.fake("qstat", 'echo "    job_state = $([ -e $D/status ] && echo F || echo R)"\n'
                           '[ -e $D/status ] && echo "    Exit_status = $(cat $D/status)"; exit 0\n')
        (self.folder / "nodes").write_text("localhost\nlocalhost\n")
        done = self.submit("--ntasks-per-node", "2", "--env", "X=1", "--", "sh", "-c", SAY_AND_EXIT + "3", status=3)
        for rank in range(2):
            self.assertIn(f"rank {rank} of 2", done.stdout)
        self.assertIn("#PBS -l select=1:ncpus=2:mpiprocs=2\n", done.stderr)  # the script is shown
        self.assertIn("cohort: job 12.server: F\n", done.stderr)
        run = (self.folder / "runs/latest").resolve()
        self.assertEqual((self.folder / "calls").read_text(), f"qsub {run}/submit.sh\n")
        self.assertEqual(json.loads((run / "submit.json").read_text())["job"], "12.server")
        self.assertEqual(json.loads((run / "job.json").read_text())["exit_status"], 3)
        again = self.submit("--follow", "12.server", status=3)
        self.assertIn("rank 1 of 2", again.stdout)
        # A server that does not answer says nothing of it. One that has forgotten it: the run's own record says it.
        self.fake("qstat", "[ -e $D/asked ] && { echo qstat: Unknown Job Id 12.server >&2; exit 153; }\n"
                           "echo >$D/asked; echo 'qstat: cannot connect to server server (errno=15010)' >&2; exit 1\n")
        said = self.submit("--follow", str(run), status=3).stderr
        self.assertIn("job 12.server: state is not known now: qstat: cannot connect to server server (errno=15010)\n", said)
        self.assertIn("job 12.server: gone\n", said)

    def test_a_job_of_flux(self):
        self.fake("flux", 'echo "flux $*" >>$D/calls\ncase $1 in\n'
                          "  batch) " + self.fake_start('"$2"') + "echo f2Vd ;;\n"
                          "  hostlist) echo localhost ;;\n"
                          '  jobs) if [ -e $D/status ]; then echo "FAILED $(cat $D/status)"; else echo "RUN "; fi ;;\nesac\n')
        done = self.submit("--ntasks-per-node", "2", "--", "sh", "-c", SAY_AND_EXIT + "5", status=5)
        self.assertIn("rank 1", done.stdout)
        self.assertIn("flux jobs -n -o {status} {returncode} f2Vd\n", (self.folder / "calls").read_text())
        for status in (0, 1):  # as older and newer ones end
            self.fake("flux", f"echo JobID f2Vd unknown >&2; exit {status}\n")
            self.assertIn("job f2Vd: gone\n", self.submit("--follow", "f2Vd", status=5).stderr)

        for state, status in (("CANCELED -128", 143), ("CANCELED -15", 143), ("FAILED -9", 137), ("TIMEOUT 142", 124), ("COMPLETED 0", 0)):
            self.fake("flux", f"echo '{state}'\n")  # -128: before it began
            self.submit("--follow", "f2Vd", status=status)

    def test_torques_xml(self):
        self.fake("qsub", "echo 12.server\n")
        self.fake("qstat", "echo '<Data><Job><Job_Id>12.server</Job_Id><job_state>C</job_state><exit_status>3</exit_status></Job></Data>'\n")
        self.assertIn("job 12.server: C\n", self.submit("./train", status=3).stderr)

    def test_a_refused_requeue(self):
        script = self.folder / "script"
        for refused, status in ((0, 0), (1, 75)):
            self.fake("scontrol", f"echo requeue $2; exit {refused}\n")
            text = self.script("--scheduler", "slurm", "sh", "-c", "exit 75")
            script.write_text(text.replace("DIR", str(self.folder)).replace("cohort run", f"{COHORT} run").replace("/runs/NAME", "/run"))
            done = subprocess.run(["bash", script], timeout=PATIENCE, check=False, capture_output=True, text=True,
                                  env={"PATH": f"{self.folder}/bin", "HOME": str(self.folder), "SLURM_JOB_ID": "7"})
            self.assertEqual(done.returncode, status, done.stdout + done.stderr)
            self.assertIn("requeue 7\n", done.stdout)

    def test_links_that_lead_nowhere_are_copied_as_links(self):
        self.fake("ssh", 'echo "$*" >>$D/asked; exit 0\n')
        self.fake("rsync", "cat >$D/files; exit 23\n")
        project = self.folder / "project"
        (project / "data").mkdir(parents=True)
        for link, target in (("loop", "loop"), ("data/gone", "/nowhere/x")):
            (project / link).symlink_to(target)
        (project / "train").write_text("")
        options = self.words("--login", "me@login", "--sync", "--", "./train")
        done = subprocess.run(**{**options, "cwd": project}, timeout=PATIENCE, check=False)
        self.assertNotIn("filesystem error", done.stderr)
        # Copying is not in the terminal's foreground: a question would never be seen.
        self.assertIn("BatchMode=yes", (self.folder / "asked").read_text())
        self.assertEqual(sorted((self.folder / "files").read_text().split("\0")), ["", "data/gone", "loop", "train"])

    def test_a_job_that_is_cancelled_does_not_come_back(self):
        script = self.folder / "script"
        self.fake("scontrol", 'case $1 in -o) echo "JobId=$4 JobState=CANCELLED Reason=None";; *) echo requeued;; esac\n')
        text = self.script("--scheduler", "slurm", "sh", "-c", "exit 75")
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

    def test_the_login_node(self):
        self.fake("ssh", 'echo "$*" | head -1 >$D/ssh; shift 2; printf %s "$1" >$D/order; exec sh -c "$1"\n')
        self.fake("sbatch", "echo 9\n")
        self.fake("scontrol", "echo JobState=COMPLETED ExitCode=0:0\n")
        done = self.submit("--login", "me@login", "--nodes", "2", "--max-restarts", "3", "--", "./train", "a b")
        self.assertIn("-- me@login exec sh -c ", (self.folder / "ssh").read_text())
        self.assertIn("#SBATCH --nodes=2\n", done.stderr)
        self.assertRegex(done.stderr, r"(?m)^\S+ run --run-dir \S+ --max-restarts 3 -- ./train 'a b' &$")
        done = self.submit("--login", "me@login", "--as-horovod=false", "./train")
        self.assertNotIn("--as-horovod ", done.stderr)
        self.assertNotIn("\n", (self.folder / "order").read_text())  # csh takes none in a word
        self.assertIn("there is no /nowhere on me@login", self.submit("--login", "me@login", "--chdir", "/nowhere", "./train", status=1).stderr)
        self.assertIn("there is no /nowhere/cohort on", self.submit("--login", "me@login", "--remote-cohort", "/nowhere/cohort", "./train", status=1).stderr)


if __name__ == "__main__":
    unittest.main()
