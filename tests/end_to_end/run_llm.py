"""Load a model in vLLM as its users do, answer prompts greedily, and say which method serves its linear layers."""

import json
import sys
from collections import Counter
from itertools import groupby


def linear_methods(model):
    found = Counter()
    for module in model.modules():
        if hasattr(module, "quant_method") and "proj" in str(getattr(module, "prefix", "")):
            loaded = getattr(module, "p2q", None)
            served = (loaded.kernel, loaded.proved) if loaded else ("-", "-")
            found[" ".join(map(str, (type(module.quant_method).__name__, *served)))] += 1
    return found


def first_scales(model):
    """[scale, rows] of each run of equal scales in the first fused layer that p2q serves."""
    module = next((module for module in model.modules() if hasattr(module, "p2q")), None)
    values = module.weight_scale.flatten().tolist() if module else []
    return [[value, len(list(run))] for value, run in groupby(values)]


if __name__ == "__main__":
    request = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    llm = LLM(request["model"], **{"enforce_eager": True, **request["options"]}, dtype="bfloat16", max_model_len=1088)
    outputs = llm.generate(
        request["prompts"], SamplingParams(temperature=0, max_tokens=request["max_tokens"]), use_tqdm=False
    )
    answer = {
        "texts": [output.outputs[0].text for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "scales": llm.apply_model(first_scales)[0],
        "methods": llm.apply_model(linear_methods)[0],
    }
    print("result: " + json.dumps(answer))
