"""Load a model in vLLM as its users do, answer prompts greedily, and say which method serves its linear layers."""

import json
import sys
from collections import Counter


def linear_methods(model):
    found = Counter()
    for module in model.modules():
        if hasattr(module, "quant_method") and "proj" in str(getattr(module, "prefix", "")):
            loaded = getattr(module, "p2q", None)
            served = (loaded.kernel, loaded.proved) if loaded else ("-", "-")
            found[" ".join(map(str, (type(module.quant_method).__name__, *served)))] += 1
    return found


if __name__ == "__main__":
    request = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    llm = LLM(request["model"], dtype="bfloat16", enforce_eager=True, max_model_len=1088, **request["options"])
    outputs = llm.generate(
        request["prompts"], SamplingParams(temperature=0, max_tokens=request["max_tokens"]), use_tqdm=False
    )
    answer = {
        "texts": [output.outputs[0].text for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "methods": llm.apply_model(linear_methods)[0],
    }
    print("result: " + json.dumps(answer))
