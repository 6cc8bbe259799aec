"""Serve a .gguf file by llama.cpp, for scripts that compare servers.

    PYTHONPATH=FOLDER python scripts/serve_llama_cpp.py FILE.gguf --port 8001 [--slots 1] [--context 8192]
        [--draft FILE.gguf] [--template FILE]

On a machine with other work, set GOMP_SPINCOUNT=0: its threads meet in each operation, and one that waits for a thread
which has no processor now keeps the other's. FOLDER is where `pip install --target FOLDER xllamacpp` has put the
package, which is built for AVX2. Where $LLAMA_SERVER names a llama-server, built for this processor, that serves.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path


def main() -> None:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--template", type=Path, help="a chat template in place of the file's")
    parser.add_argument("--context", type=int, default=8192, help="tokens of all slots together")
    parser.add_argument("--slots", type=int, default=1, help="requests at once")
    parser.add_argument("--draft", help="a .gguf file that drafts, with the library's own number of tokens")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    program = os.environ.get("LLAMA_SERVER")
    if program:
        command = [program, "-m", options.file, "--port", str(options.port), "-np", str(options.slots)]
        command += ["-c", str(options.context), "-t", str(threads), "--cache-ram", "0", "-lv", "1"]
        command += ["-md", options.draft, "--spec-type", "draft-simple"] if options.draft else []
        command += ["--chat-template-file", str(options.template)] if options.template is not None else []
        os.execv(program, command)  # noqa: S606 - nothing of this process is left
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = options.file
    params.n_parallel = options.slots
    params.n_ctx = options.context
    params.port = options.port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0  # what one pass has read does not help the next
    params.verbosity = -1
    if options.draft:
        params.speculative.draft.mparams.path = options.draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    if options.template is not None:
        params.chat_template = options.template.read_text(encoding="utf-8")
    server = xllamacpp.Server(params)
    print(f"serving {options.file} at {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
