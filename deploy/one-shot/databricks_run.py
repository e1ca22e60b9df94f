"""Runs a program of Redeliver as a task of a Databricks job: `databricks_run.py PROGRAM [ARGUMENT]...`.

`REDELIVER_PROGRAMS` names the directory of the programs, such as a volume of Unity Catalog.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def run(name: str, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        # A volume keeps no permission to execute.
        program = Path(shutil.copy(Path(os.environ["REDELIVER_PROGRAMS"]) / name, directory))
        program.chmod(0o700)
        # A pipe: a task shows only what Python prints.
        with subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
            finally:
                # Also when the task is cancelled: the program ends its transactions.
                process.terminate()
        return process.returncode


if __name__ == "__main__":
    status = run(sys.argv[1], sys.argv[2:])
    # `sys.exit(0)` also fails some versions of the task.
    if status != 0:
        raise SystemExit(f"{sys.argv[1]}: exit status {status}")
