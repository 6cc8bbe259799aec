"""Run by tests/integrations/test_vllm.py in a process of its own: one vLLM engine, several lists of requests.

    python vllm_driver.py JOB.json OUT.json

The job names the model, arguments of the engine, and for each list of requests their prompts and sampling parameters;
what comes out are the tokens of each request and vLLM's counters of drafts after each list.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
FIXED = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128, "enforce_eager": True}


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    alone = job["engine"].get("tensor_parallel_size", 1) == 1
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if alone else "1"
    if not job.get("plugin", True):
        os.environ["VLLM_PLUGINS"] = "lora_filesystem_resolver"
    import draftproof.integrations.vllm as plugin

    if "known" in job:
        plugin.KNOWN = tuple(job["known"])

    from vllm import LLM, SamplingParams
    from vllm.v1.sample import rejection_sampler

    llm = LLM(
        job["model"], disable_log_stats=False, generation_config="vllm", max_num_seqs=256, **FIXED, **job["engine"]
    )
    outputs, counters = [], []
    for requests in job["lists"]:
        params = [SamplingParams(**each["params"], ignore_eos=True, detokenize=False) for each in requests]
        found = llm.generate([{"prompt_token_ids": each["prompt"]} for each in requests], params, use_tqdm=False)
        outputs.append([list(each.outputs[0].token_ids) for each in found])
        values = {m.name.removeprefix("vllm:spec_decode_"): getattr(m, "value", None) for m in llm.get_metrics()}
        counters.append({name: values.get(name, 0) for name in ("num_drafts", "num_accepted_tokens")})
    changed = hasattr(rejection_sampler.rejection_sample, "_draftproof")
    Path(sys.argv[2]).write_text(json.dumps({"tokens": outputs, "counters": counters, "changed": changed}))


if __name__ == "__main__":
    main()
