"""Another engine in its own process, started by `engines`: reads one JSON request a line, answers each with seconds.

Its Python environment may have only the other engine, so this file must not use draftproof.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

Request = dict[str, Any]  # "prompts": lists of token ids, "tokens": of each answer, "temperature"
Generate = Callable[[Request], float]  # seconds for all prompts together
READY = "ready"
CONTEXT = 2304  # tokens of a request of llama.cpp


def vllm(model: str, dtype: str, batch: int) -> Generate:
    """vLLM's offline engine."""
    from vllm import LLM, SamplingParams

    engine = LLM(model, dtype=dtype, max_num_seqs=batch, max_model_len=1024, enable_prefix_caching=False)

    def generate(request: Request) -> float:
        params = SamplingParams(
            temperature=request["temperature"], max_tokens=request["tokens"], ignore_eos=True, seed=1
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(out.outputs[0].token_ids) == request["tokens"] for out in outputs), "an answer ended early"
        return seconds

    return generate


def transformers(model: str, dtype: str, batch: int) -> Generate:  # noqa: ARG001 - all engines take these arguments
    """transformers' generate, with prompts padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    engine = library.from_pretrained(model, dtype=dtype).eval()

    def generate(request: Request) -> float:
        width = max(map(len, request["prompts"]))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in request["prompts"]])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in request["prompts"]])
        options: dict[str, Any] = {"do_sample": False}
        if request["temperature"]:
            options = {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        options |= {"min_new_tokens": request["tokens"], "max_new_tokens": request["tokens"], "pad_token_id": 0}
        torch.manual_seed(1)
        start = time.perf_counter()
        out = engine.generate(ids, attention_mask=mask, **options)
        seconds = time.perf_counter() - start
        assert out.shape[1] == width + request["tokens"], "an answer ended early"
        return seconds

    return generate


def llama_cpp(model: str, dtype: str, batch: int) -> Generate:  # noqa: ARG001 - a .gguf file has its own type
    """llama.cpp's server, with one slot for each request: the program $LLAMA_SERVER, else the package xllamacpp.

    A program that was built on this machine uses all of its processor; the package is built for AVX2.
    """
    program = os.environ.get("LLAMA_SERVER")
    answer = llama_program(program, model, batch) if program else llama_package(model, batch)

    def complete(request: Request, ids: list[int]) -> None:
        out = answer(completion(request, ids))
        assert out["usage"]["completion_tokens"] == request["tokens"], out

    def generate(request: Request) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(request["prompts"])) as pool:
            list(pool.map(lambda ids: complete(request, ids), request["prompts"]))
        return time.perf_counter() - start

    return generate


def completion(request: Request, ids: list[int]) -> dict[str, Any]:
    """The body of a request to llama.cpp's server."""
    return {
        "prompt": ids,
        "n_predict": request["tokens"],
        "temperature": request["temperature"],
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 1,
        "ignore_eos": True,
        "cache_prompt": False,
    }


def _threads() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def llama_package(model: str, batch: int) -> Callable[[dict[str, Any]], Any]:
    """A server in this process: what answers the body of a request for a completion."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = batch
    params.n_ctx = CONTEXT * batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _threads()
    params.verbosity = -1
    server = xllamacpp.Server(params)
    answer: Callable[[dict[str, Any]], Any] = server.handle_completions
    return answer


def llama_program(program: str, model: str, batch: int) -> Callable[[dict[str, Any]], Any]:
    """A server in a process of its own, which ends with this one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    command = [program, "-m", model, "--port", str(port), "-np", str(batch), "-c", str(CONTEXT * batch), "-lv", "1"]
    command += ["-t", str(_threads())]
    process = subprocess.Popen(command, stdout=sys.stderr)  # noqa: S603 - the user's own program
    atexit.register(process.kill)

    def ask(method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        found = connection.getresponse()
        content = found.read()
        connection.close()
        return found.status, content

    while True:
        if process.poll() is not None:
            raise SystemExit(f"{program} ended with code {process.returncode}")
        with suppress(OSError):  # it does not listen yet
            if ask("GET", "/health")[0] == http.client.OK:
                return lambda body: json.loads(ask("POST", "/v1/completions", body)[1])
        time.sleep(0.2)


WORKERS = {"vllm": vllm, "transformers": transformers, "llama.cpp": llama_cpp}


def main() -> None:
    """Load an engine and answer the requests on stdin; everything that the engine prints goes to stderr."""
    name, model, dtype, batch = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        generate = WORKERS[name](model, dtype, int(batch))
        print(READY, file=channel, flush=True)
        for line in sys.stdin:
            print(json.dumps(generate(json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    main()
