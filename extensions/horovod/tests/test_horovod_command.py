"""horovodrun, which passes Horovod's options to `cohort run`; and --as-horovod, for what a program finds."""

import contextlib
import importlib.util
import io
import os
import pathlib
import shutil
import sys
import unittest
import unittest.mock

from cohort import _core
from cohort._launch import command as _command
from cohort._process import gpus as _gpus
from run_support import Folder

COMMAND = pathlib.Path(_command.find())
AS_HOROVOD = COMMAND.parent.parent / "share" / "cohort" / "as-horovod"
sys.path.insert(0, str(AS_HOROVOD))

from horovod.runner import _launching, _options, launch  # noqa: E402

ENVIRONMENT = """
import os, sys
import horovod
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "CONTROLLER")
print(*(os.environ["HOROVOD_" + name] for name in names), sys.argv[1:], horovod.__version__)
print("threshold", os.environ.get("HOROVOD_FUSION_THRESHOLD"))
"""


class Options(Folder):
    def test_what_cohort_run_gets(self):
        arguments, environment, notes = launch.command_of(
            ["-np", "2", "-H", "localhost:4", "--start-timeout", "60", "-prefix-timestamp", "python", "train.py", "-np", "7"]
        )
        self.assertEqual(
            arguments,
            ["run", "--as-horovod", "-np", "2", "--prefix", "full", "--start-timeout", "60.0", "-H", "localhost:4", "--",
             "python", "train.py", "-np", "7"],
        )
        self.assertEqual((environment, notes), ({}, []))

    def test_variables(self):
        _, environment, notes = launch.command_of(
            ["--num-proc", "1", "--fusion-threshold-mb", "2", "--cache-capacity", "0", "--timeline-filename", "t.json",
             "--timeline-mark-cycles", "--no-stall-check", "--stall-check-warning-time-seconds", "5",
             "--stall-check-shutdown-time-seconds", "9", "--gloo-timeout-seconds", "11", "--log-level", "WARNING", "a"]
        )
        self.assertEqual(
            environment,
            {
                "HOROVOD_FUSION_THRESHOLD": "2097152",
                "HOROVOD_CACHE_CAPACITY": "0",
                "HOROVOD_TIMELINE": "t.json",
                "HOROVOD_TIMELINE_MARK_CYCLES": "1",
                "HOROVOD_STALL_CHECK_DISABLE": "1",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
                "COHORT_TIMEOUT": "11",
                "COHORT_LOG": "warn",
            },
        )
        self.assertEqual(notes, [])

    def test_what_has_no_meaning_is_said_by_the_name_it_was_given(self):
        given = ["--cycle-time-ms", "1", "--mpi", "--mpi-args=-x A", "--autotune", "--no-hierarchical-allreduce", "--tcp",
                 "-p", "22", "-i", "/dev/null", "--num-nccl-streams", "2", "--thread-affinity", "0,1"]
        _, environment, notes = launch.command_of(["-np", "1", *given, "a"])
        self.assertEqual(environment, {})
        spelled = {note.split(" has no meaning here -- ")[0] for note in notes}
        # A "--no-..." for a feature that does not exist needs no note.
        wanted = {word.split("=")[0] for word in given if word.startswith("-")} - {"--no-hierarchical-allreduce"}
        self.assertEqual(spelled, wanted)

    def test_every_option_of_horovod_is_known(self):
        parser = launch._options.make_parser()
        known = {name for action in parser._actions for name in action.option_strings}
        wanted = """-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
            --network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
            --fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
            --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune
            --no-autotune --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
            --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc --max-np
            --max-num-proc --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range
            --host-discovery-script --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check
            --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-threads-disable
            --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
            --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
            --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
            --gloo --mpi --jsrun""".split()
        self.assertEqual(set(wanted) - known, set())
        # Each option has an effect, or a note.
        wishes = {action.dest for action in parser._actions} - {"help", "version", "check_build", "command", "config_file"}
        heeded = {"num_proc", "disable_cache", "start_timeout", "output_filename", "verbose", "gloo", "hosts", "hostfile",
                  "prefix_output_with_timestamp", "fusion_threshold_mb", "cache_capacity", "timeline_filename",
                  "timeline_mark_cycles", "stall_check", "stall_check_warning_time_seconds",
                  "stall_check_shutdown_time_seconds", "gloo_timeout_seconds", "log_level", "network_interfaces", "ssh_port",
                  "ssh_identity_file", *_launching.ELASTIC}
        self.assertEqual(wishes, heeded | set(_launching.NO_MEANING))

    def test_an_elastic_job(self):
        arguments, _, notes = launch.command_of(
            ["-np", "3", "--min-num-proc", "2", "--max-np", "4", "--reset-limit", "0", "--elastic-timeout", "60", "a"]
        )
        self.assertEqual(
            arguments[-10:],
            ["--min-np", "2", "--max-np", "4", "--reset-limit", "0", "--elastic-timeout", "60.0", "--", "a"],
        )
        self.assertEqual(notes, [])
        arguments, _, _ = launch.command_of(
            ["-np", "3", "--host-discovery-script", "./hosts.sh", "--slots-per-host", "2", "--blacklist-cooldown-range", "10",
             "60", "a"]
        )
        self.assertEqual(
            arguments[-10:],
            ["--min-np", "3", "--host-discovery-script", "./hosts.sh", "--slots-per-host", "2", "--blacklist-cooldown-range",
             "10,60", "--", "a"],
        )

    def refused(self, words, *given):
        with self.assertRaisesRegex(ValueError, words):
            launch.command_of([*given, "python", "train.py"])

    def test_what_would_be_another_job_is_refused(self):
        self.refused("at least one is needed", "-np", "0")
        self.refused("-np N, the number of processes, is missing")
        with self.assertRaisesRegex(ValueError, "no program to run"):
            launch.command_of(["-np", "1"])

    def test_the_programs_own_words_are_its_own(self):
        given = _options.make_parser().parse_args("-np 1 python train.py --log info --min 3 --b".split())
        self.assertEqual(given.command, "python train.py --log info --min 3 --b".split())

    def test_what_argparse_refuses(self):
        for wrong in (["-np", "x", "a"], ["-np", "1", "--no-such", "a"], ["-np", "1", "--gloo", "--mpi", "a"],
                      ["-np", "1", "--autotune-gaussian-process-noise", "2", "a"], ["-np", "1", "--log-level", "LOUD", "a"]):
            with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit) as ended:
                launch.command_of(wrong)
            self.assertEqual(ended.exception.code, 2)

    def ways(self, *given):
        """Returns the options of `cohort run` after --start-timeout, which say where and how to start ranks."""
        arguments, _, notes = launch.command_of(["-np", "4", *given, "a"])
        self.assertEqual(notes, [])
        return arguments[arguments.index("--start-timeout") + 2 : -2]

    def test_hosts_and_how_they_are_reached(self):
        key = self.folder / "my key"
        key.touch()
        quiet = {"COHORT_RUN_SSH": "", "COHORT_RUN_STARTER": ""}
        with unittest.mock.patch.dict(os.environ, quiet):
            self.assertEqual(self.ways("-H", "a:2,b:2"), ["-H", "a:2,b:2"])
            self.assertEqual(self.ways("--hosts", "a:4"), ["-H", "a:4"])
            for spelling in ("-hostfile", "--hostfile"):
                self.assertEqual(self.ways(spelling, "hosts"), ["--hostfile", "hosts"])
            self.assertEqual(
                self.ways("-H", "a:2,b:2", "-p", "2222", "-i", str(key)),
                ["-H", "a:2,b:2", "--ssh", f"ssh -p 2222 -i '{key}'", "--starter", "ssh"],
            )
            self.assertEqual(
                self.ways("-H", "a:2,b:2", "--network-interfaces", "eth0,ib0"), ["-H", "a:2,b:2", "--network", "eth0,ib0"]
            )
            self.assertEqual(
                self.ways("--network-interface", "eth0", "--network-interface", "ib0"), ["--network", "eth0,ib0"]
            )
        # Settings of ssh in the environment are kept, too.
        with unittest.mock.patch.dict(os.environ, COHORT_RUN_SSH="ssh -F there", COHORT_RUN_STARTER="mpirun"):
            self.assertEqual(
                self.ways("-H", "a:4", "--ssh-port", "7"), ["-H", "a:4", "--ssh", "ssh -F there -p 7"]
            )
        # Hosts may also come from the environment.
        with unittest.mock.patch.dict(os.environ, quiet, SLURM_JOB_ID="7", SLURM_NNODES="2"):
            self.assertEqual(self.ways("-p", "7"), ["--ssh", "ssh -p 7", "--starter", "ssh"])

    def test_wrong_hosts_and_ways(self):
        at = ("-np", "1", "-H", "a:1")
        for port in ("0", "65536", "-1"):
            self.refused(f"-p: {port} -- the port", *at, "-p", port)
        self.refused("-i: '/no/such': No such file or directory -- the file of a private key", *at, "-i", "/no/such")
        self.refused("-H is empty", "-np", "1", "-H", "")
        self.refused("-hostfile is empty", "-np", "1", "-hostfile", "")
        self.refused("--network-interfaces is empty", *at, "--network-interfaces", ",")
        for seconds in ("0", "-1", "nan", "inf"):
            self.refused(f"--start-timeout: {seconds}.* -- a number of seconds", *at, "--start-timeout", seconds)
        with unittest.mock.patch.dict(os.environ, HOROVOD_START_TIMEOUT="soon"):
            self.refused("HOROVOD_START_TIMEOUT: 'soon' -- a number of seconds", *at)
        with unittest.mock.patch.dict(os.environ, HOROVOD_START_TIMEOUT="90"):
            self.assertIn("90.0", launch.command_of([*at, "a"])[0])

    @unittest.skipUnless(importlib.util.find_spec("yaml"), "PyYAML is not installed")
    def test_config_files(self):
        path = self.folder / "config.yaml"
        path.write_text(
            "controller: mpi\nparams: {fusion_threshold_mb: 4, cycle_time_ms: 2}\nstall_check: {enabled: false}\n"
            "timeline: {filename: t.json, mark_cycles: true}\nlogging: {level: INFO}\n"
        )
        _, environment, notes = launch.command_of(["-np", "1", "--config-file", str(path), "--fusion-threshold-mb", "8", "a"])
        self.assertEqual(environment["HOROVOD_FUSION_THRESHOLD"], str(8 << 20), "the command line wins")
        self.assertEqual(environment["HOROVOD_STALL_CHECK_DISABLE"], "1")
        self.assertEqual(environment["HOROVOD_TIMELINE"], "t.json")
        self.assertEqual(len(notes), 2)
        path.write_text("params: {speed: 4}\n")
        self.refused("there is no params.speed", "-np", "1", "--config-file", str(path))

    def test_config_files_section_by_section(self):
        from horovod.runner import _config

        self.assertEqual(_config.wishes_of({"autotune": {"enabled": True}, "controller": "gloo"}, "f"),
                         {"autotune": True, "gloo": True})
        for wrong in ([1], {"speed": {}}, {"controller": "x"}, {"timeline": {"x": 1}}):
            with self.assertRaises(ValueError):
                _config.wishes_of(wrong, "f")

    def test_without_yaml(self):
        with unittest.mock.patch.dict(sys.modules, yaml=None):
            self.refused("PyYAML", "-np", "1", "--config-file", "x.yaml")


class Commands(Folder):
    def test_horovodrun(self):
        program = self.script(ENVIRONMENT)
        status, out, err = self.command(
            sys.executable, COMMAND.parent / "horovodrun", "-np", "2", "-H", "localhost:2", "--cycle-time-ms", "1",
            "--fusion-threshold-mb", "1", "--output-filename", self.folder / "out", sys.executable, program, "-x",
        )
        self.assertEqual(status, 0, err)
        for rank in range(2):
            self.assertRegex(out, rf"(?m)^\S+:{rank} \| {rank} 2 {rank} 2 0 1 gloo \['-x'\] 0\.28\.1\+cohort$")
            text = (self.folder / "out" / f"rank.{rank}" / "stdout").read_text()
            self.assertIn(f"{rank} 2 {rank} 2", text)
            self.assertIn("threshold 1048576\n", text)
        self.assertIn("horovodrun: --cycle-time-ms has no meaning here", err)

    def test_the_status_is_the_ranks(self):
        status, _, err = self.command(sys.executable, COMMAND.parent / "horovodrun", "-np", "1", "sh", "-c", "exit 4")
        self.assertEqual(status, 4, err)

    def test_hosts(self):
        """All of the hosts are this machine."""
        program = self.script(ENVIRONMENT)
        hosts = self.folder / "hosts"
        hosts.write_text("# ours\n\na slots=1  # one\nb slots=2\n")
        for where in (("-H", "a:1,b:2"), ("-hostfile", hosts)):
            status, out, err = self.command(
                sys.executable, COMMAND.parent / "horovodrun", "-np", "3", *where, "--network-interfaces", "lo", sys.executable,
                program, COHORT_RUN_STARTER="local",
            )
            self.assertEqual(status, 0, err)
            # rank, size, local rank and size, cross rank and size
            for line in ("a:0 | 0 3 0 1 0 2", "b:1 | 1 3 0 2 1 2", "b:2 | 2 3 1 2 0 1"):
                self.assertIn(f"{line} gloo", out)

    def test_hosts_that_cannot_be(self):
        hosts = self.folder / "hosts"
        hosts.write_text("localhost slots=2\nlocalhost slots=two\n")
        for words, given in {
            "4 processes do not fit the 2 slots of 1 host": ("-H", "localhost:2"),
            "-H localhost:x: .*slots that are no number": ("-H", "localhost:x"),
            "line 2 'localhost slots=two'": ("--hostfile", hosts),
            "--hostfile: cannot open .*hosts-x -- No such file": ("--hostfile", f"{hosts}-x"),
            "--network nowhere0: it fits no address of this host, which has": ("--network-interface", "nowhere0"),
        }.items():
            status, _, err = self.command(sys.executable, COMMAND.parent / "horovodrun", "-np", "4", *given, "true")
            self.assertEqual(status, 2, err)
            self.assertRegex(err, words)

    def test_this_host_by_two_names_has_the_slots_of_both(self):
        status, out, err = self.command(
            sys.executable, COMMAND.parent / "horovodrun", "-np", "4", "-H", "localhost:2,127.0.0.1:2", "sh", "-c",
            "echo $RANK of $LOCAL_WORLD_SIZE",
        )
        self.assertEqual(status, 0, err)
        self.assertIn("3 of 4\n", out)
        self.assertEqual(err.count("localhost and 127.0.0.1 are both this host, which has 4 slots\n"), 1, err)

    def test_help_says_what_is_true(self):
        status, out, _ = self.command(sys.executable, COMMAND.parent / "horovodrun", "--help", COLUMNS="200")
        self.assertEqual(status, 0)
        self.assertIn("-H HOST:SLOTS,..., --hosts HOST:SLOTS,...\n", out)
        self.assertIn("hosts, and how many ranks each takes (this host)", out)
        self.assertNotIn("so far", out)
        for words in _launching.NO_MEANING.values():
            self.assertIn(words, " ".join(out.split()))

    def test_check_build_and_version(self):
        status, out, err = self.command(sys.executable, COMMAND.parent / "horovodrun", "--check-build")
        self.assertEqual(status, 0, err)
        for row in ("Available Frameworks:", "Available Controllers:", "Available Tensor Operations:", "[X] Gloo", "[ ] MPI"):
            self.assertIn(row, out)
        self.assertIn(f"[{'X' if shutil.which('mpirun') else ' '}] MPI\n    [X] Gloo\n\n", out)  # the controllers
        gpus = _gpus.of_host() > 0 and _core.nccl_version() > 0
        self.assertIn(f"[{'X' if gpus else ' '}] NCCL", out)
        for package, framework in (("torch", "PyTorch"), ("tensorflow", "TensorFlow")):
            here = "X" if importlib.util.find_spec(package) else " "
            self.assertIn(f"[{here}] {framework}", out)
        status, out, _ = self.command(sys.executable, COMMAND.parent / "horovodrun", "-v")
        self.assertEqual((status, out), (0, "0.28.1+cohort\n"))

    def test_as_horovod_comes_before_what_is_installed(self):
        other = self.folder / "installed" / "horovod"
        other.mkdir(parents=True)
        (other / "__init__.py").write_text("raise RuntimeError('the other one')\n")
        path = f"{other.parent}:{os.environ.get('PYTHONPATH', '')}"
        program = "import os, horovod; print(horovod.__version__, os.environ['PYTHONPATH'].count('as-horovod'))"
        status, out, err = self.command(
            COMMAND, "run", "-q", "--prefix", "none", "--as-horovod", "-np", "1", "--", sys.executable, "-c", program,
            PYTHONPATH=path,
        )
        self.assertEqual((status, out), (0, "0.28.1+cohort 1\n"), err)


if __name__ == "__main__":
    unittest.main()
