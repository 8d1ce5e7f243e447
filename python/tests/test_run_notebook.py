"""The notebook of the examples: in a kernel without a browser where Jupyter's parts are installed, else cell by cell."""

import importlib.util
import json
import os
import pathlib
import shutil
import sys
import unittest

from run_support import CELLS, Folder, needs_cloudpickle

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
NOTEBOOK = EXAMPLES / "07-notebook" / "digits.ipynb"

# Time limit of one cell; a kernel, two ranks and three torches start on whatever cores are free.
PATIENCE = 200

# cohort.distributed is the backend "cohort" of torch.distributed.
HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "numpy", "cohort.distributed"))
HAS_JUPYTER = all(importlib.util.find_spec(name) for name in ("nbclient", "nbformat", "ipykernel", "jupyter_client"))


@needs_cloudpickle
class Notebook(Folder):
    def copy(self):
        """The notebook where it may write, as far from the data as in the clone."""
        here = self.folder / "examples" / "07-notebook"
        here.mkdir(parents=True)
        (self.folder / "data").symlink_to(EXAMPLES.parent / "data")
        return pathlib.Path(shutil.copy(NOTEBOOK, here))

    def check(self, out, folder):
        self.assertRegex(out, r"(?m)^one process: 9\d\.\d% of the test images$")
        self.assertRegex(out, r"(?m)^2 processes: 9\d\.\d% of the test images$")
        for rank in range(2):
            self.assertRegex(out, rf"(?m)^\S+:{rank} \| epoch 7: loss of my images 0\.\d+$")
        self.assertIn("['rank 0 of 2', 'rank 1 of 2']\n", out)
        self.assertIn("rank 1: no more digits\n", out)
        self.assertEqual(len(list((folder / "checkpoints").glob("checkpoint-*.pth.tar"))), 8)

    @unittest.skipUnless(HAS_TORCH, "torch or NumPy is not installed, or Cohort's backend for torch is not there")
    def test_cell_by_cell(self):
        notebook = self.copy()
        program = self.script(CELLS)
        process = self.start(
            "sh", "-c", 'cd "$1" && exec "$2" "$3" "$4"', "sh", notebook.parent, sys.executable, program, notebook,
            OMP_NUM_THREADS="1",
        )
        status, out, err = self.ends(process)
        self.assertEqual(status, 0, err)
        self.check(out, notebook.parent)
        self.assertRegex(err, r'(?m)^\S+:1 \|     raise ValueError\("no more digits"\)$')

    @unittest.skipUnless(HAS_TORCH and HAS_JUPYTER, "torch, NumPy, nbclient or ipykernel is not installed, or the backend is not there")
    def test_in_a_kernel(self):
        import nbclient
        import nbformat

        notebook = self.copy()
        content = nbformat.read(notebook, as_version=4)
        client = nbclient.NotebookClient(
            content, timeout=PATIENCE, kernel_name="python3", resources={"metadata": {"path": str(notebook.parent)}}
        )
        client.execute(env=dict(os.environ, OMP_NUM_THREADS="1", IPYTHONDIR=str(self.folder), PYTHONUTF8="1"))
        out, err = "", ""
        for cell in content.cells:
            for output in cell.get("outputs", ()):
                if output.output_type == "stream" and output.name == "stdout":
                    out += output.text
                elif output.output_type == "stream":
                    err += output.text
        self.check(out, notebook.parent)
        self.assertRegex(err, r'(?m)^\S+:1 \|     raise ValueError\("no more digits"\)$')

    @unittest.skipUnless(HAS_JUPYTER, "nbclient or ipykernel is not installed")
    def test_interrupting_the_kernel_ends_all_and_the_kernel_lives(self):
        from jupyter_client.manager import KernelManager

        manager = KernelManager(kernel_name="python3")
        manager.start_kernel(
            env=dict(os.environ, COHORT_TEST_MARK=str(self.folder), IPYTHONDIR=str(self.folder)), cwd=str(self.folder)
        )
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=PATIENCE)
            before = set(self.processes())
            lines = []

            def hook(message):
                if message["msg_type"] == "stream":
                    lines.append(message["content"]["text"])
                    if sum("is up" in line for line in "".join(lines).splitlines()) == 2 and "sent" not in lines:
                        lines.append("sent")
                        manager.interrupt_kernel()

            code = (
                "import time, os, cohort\n"
                "def wait():\n"
                "    print('is up', flush=True)\n"
                "    time.sleep(1000)\n"
                "cohort.run(wait, np=2)\n"
            )
            reply = client.execute_interactive(code, timeout=PATIENCE, output_hook=hook)
            self.assertEqual(reply["content"].get("ename"), "KeyboardInterrupt", lines)
            self.eventually(lambda: set(self.processes()) <= before, "the ranks are gone", 20)
            values = []

            def result(message):
                if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                    values.append(message["content"]["text"])

            reply = client.execute_interactive(
                "print(cohort.run(lambda: 5, np=2, quiet=True))", timeout=PATIENCE, output_hook=result
            )
            self.assertEqual((reply["content"]["status"], "".join(values)), ("ok", "[5, 5]\n"))
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)

    def test_it_is_committed_without_output(self):
        content = json.loads(NOTEBOOK.read_text())
        for cell in content["cells"]:
            if cell["cell_type"] == "code":
                self.assertEqual((cell["outputs"], cell["execution_count"]), ([], None))


if __name__ == "__main__":
    unittest.main()
