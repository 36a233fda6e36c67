"""Plain and drafted decoding of ours beside transformers' generate, in one process: paired, interleaved, medians.

    python benchmarks/compare_generate.py --prompts gsm8k/test.jsonl --count 10 --out benchmarks/result.json

Every prompt is answered by every method in turn, REPEATS times, on the same weights; transformers runs its own stock
copy of the model. Speeds are tokens per second of the whole answer, the prompt's pass included. Ids of all methods are
compared. The last line of the output is the JSON record.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from itertools import islice
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

import flashdraft
from flashdraft.core import SamplingParams
from flashdraft.decode.compare import divergence
from flashdraft.device import load_average
from flashdraft.target.zoo import DEFAULT_MODEL, resolve
from flashdraft.train.prompts import read_prompts

REPEATS = 5
SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="file of prompts")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--suffix", default=SUFFIX)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine = flashdraft.load(device="cpu")
    stock = AutoModelForCausalLM.from_pretrained(resolve(DEFAULT_MODEL), dtype=torch.float32).eval()
    params = SamplingParams(max_new_tokens=args.new_tokens)
    taus: list[float] = []

    def drafted(ids: tuple[int, ...]) -> tuple[int, ...]:
        done = engine.complete(ids, params)
        taus.append(done.stats.tau)
        return done.ids

    @torch.inference_mode()
    def generate(ids: tuple[int, ...]) -> tuple[int, ...]:
        batch = torch.tensor([ids])
        mask = torch.ones_like(batch)
        out = stock.generate(batch, attention_mask=mask, max_new_tokens=args.new_tokens, do_sample=False)
        return tuple(out[0, len(ids) :].tolist())

    methods: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
        "transformers generate": generate,
        "plain": lambda ids: engine.complete(ids, params, drafted=False).ids,
        "drafted": drafted,
    }
    prompts = [engine.encode(p.messages) for p in islice(read_prompts(args.prompts, suffix=args.suffix), args.count)]
    for method in methods.values():
        method(prompts[0])
    taus.clear()
    speeds: dict[str, list[float]] = {name: [] for name in methods}  # a median over the repeats for each prompt
    different = []
    for number, ids in enumerate(prompts):
        rates: dict[str, list[float]] = {name: [] for name in methods}
        answers = {}
        for _ in range(REPEATS):
            for name, method in methods.items():
                begin = time.perf_counter()
                answers[name] = method(ids)
                rates[name].append(len(answers[name]) / (time.perf_counter() - begin))
        for name in methods:
            speeds[name].append(statistics.median(rates[name]))
            found = divergence(engine.target, ids, answers["plain"], answers[name])
            if found is not None:
                different.append({"prompt": number, "method": name, "place": found.place, "gap": found.gap})
        print(number, {name: round(speeds[name][-1], 1) for name in methods}, flush=True)
    record = {
        "date": date.today().isoformat(),
        "model": DEFAULT_MODEL,
        "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "load": load_average(),
        "prompts": f"{'/'.join(Path(args.prompts).parts[-2:])}, first {len(prompts)}",
        "new_tokens": args.new_tokens,
        "repeats": REPEATS,
        "tokens_per_second": {name: round(statistics.median(s), 2) for name, s in speeds.items()},
        "plain_over_generate": ratio(speeds["plain"], speeds["transformers generate"]),
        "drafted_over_generate": ratio(speeds["drafted"], speeds["transformers generate"]),
        "drafted_over_plain": ratio(speeds["drafted"], speeds["plain"]),
        "tau": round(statistics.mean(taus), 3),
        "different": different,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


def ratio(a: list[float], b: list[float]) -> dict[str, float]:
    """Ratios prompt by prompt: their median, least and most."""
    each = sorted(x / y for x, y in zip(a, b, strict=True))
    return {"median": round(statistics.median(each), 3), "min": round(each[0], 3), "max": round(each[-1], 3)}


if __name__ == "__main__":
    main()
