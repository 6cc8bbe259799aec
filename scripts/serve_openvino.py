"""OpenVINO GenAI on a .gguf file, for scripts that compare engines: one JSON request a line, seconds for each.

    PYTHONPATH=FOLDER python scripts/serve_openvino.py FILE.gguf [--lookup]

FOLDER is where `pip install --target FOLDER openvino-genai` has put the package. The first line says that it is ready;
a request has "prompts" (one list of token ids) and "tokens".
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

DRAFTED, NGRAM = 5, 3  # tokens of a draft, as in the library's own samples; the longest passage that is looked up


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--lookup", action="store_true", help="drafts what followed the last tokens in the prompt")
    options = parser.parse_args()
    made: dict[str, Any] = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
    if options.lookup:
        made["prompt_lookup"] = True
    engine = openvino_genai.LLMPipeline(options.file, "CPU", **made)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config = openvino_genai.GenerationConfig(do_sample=False, ignore_eos=True)
        config.max_new_tokens = config.min_new_tokens = asked["tokens"]
        if options.lookup:
            config.num_assistant_tokens = DRAFTED
            config.max_ngram_size = NGRAM
        ids = openvino.Tensor(np.array(asked["prompts"], np.int64))
        start = time.perf_counter()
        answer = engine.generate(ids, config)
        seconds = time.perf_counter() - start
        assert len(answer.tokens[0]) == asked["tokens"], "an answer ended early"
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
