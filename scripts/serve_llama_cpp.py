"""Serve a .gguf file by llama.cpp (package xllamacpp), with one slot, for scripts that compare servers.

    PYTHONPATH=FOLDER python scripts/serve_llama_cpp.py FILE.gguf --port 8001 [--template FILE] [--context 8192]

On a machine with other work, set GOMP_SPINCOUNT=0: its threads meet in each operation, and one that waits for a thread
which has no processor now keeps the other's. FOLDER is where `pip install --target FOLDER xllamacpp` has put the
package.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path


def main() -> None:
    """Serve until the process is stopped."""
    import xllamacpp  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--template", type=Path, help="a chat template in place of the file's")
    parser.add_argument("--context", type=int, default=8192)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.file
    params.n_parallel = 1
    params.n_ctx = options.context
    params.port = options.port
    threads = len(os.sched_getaffinity(0))
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0  # what one pass has read does not help the next
    params.verbosity = -1
    if options.template is not None:
        params.chat_template = options.template.read_text(encoding="utf-8")
    server = xllamacpp.Server(params)
    print(f"serving {options.file} at {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
