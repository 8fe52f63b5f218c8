# ruff: noqa: E402
"""Measure every GEMM config on typical shapes, beside eager, the bare GEMM, cuBLASLt's epilogue and torch.compile.

    python tests/bench/gemm.py --out DIR                     all of it (about three minutes on one H200)
    python tests/bench/gemm.py --out DIR --dry --only silu   compile only; needs nvcc, no GPU
    python tests/bench/gemm.py --out DIR --device cpu        small shapes on the CPU, to try the machinery

All kernels are compiled first, in threads, into a cache folder. Each then runs in a child process with a deadline: one
that hangs, crashes or poisons its CUDA context costs one restart and nothing else.
"""

import argparse
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")

import torch
from gemm_cases import CASES
from gemm_cases import CPU_CASES
from torch.fx.experimental.proxy_tensor import make_fx

import fusescout
from fusescout.capture.encode import encode_graph
from fusescout.device import Device

if importlib.util.find_spec("fusescout.templates") is None:  # a plain checkout: packaging maps the folder otherwise
    spec = importlib.util.spec_from_file_location(
        "fusescout.templates", ROOT / "templates/__init__.py", submodule_search_locations=[str(ROOT / "templates")]
    )
    sys.modules["fusescout.templates"] = fusescout.templates = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fusescout.templates)

from fusescout.templates import gated_mlp
from fusescout.templates import gemm_epilogue

TARGET = {"kind": "cuda", "arch": "sm_90a"}
ROUNDS = 60
LOAD_S, RUN_S, RIVALS_S = 90, 12, 120


TEMPLATES = {"gemm_epilogue": gemm_epilogue, "gated_mlp": gated_mlp}


def device(kind):
    if kind == "cpu":
        return Device("cpu", "cpu", "x86_64", torch.get_num_threads())
    return Device("cuda", "H200", "sm_90a", 132)


def cases(args):
    table = CPU_CASES if args.device == "cpu" else CASES
    return {name: c for name, c in table.items() if not args.only or any(part in name for part in args.only.split(","))}


def subgraph(c):
    dtype = torch.bfloat16
    inputs = [torch.empty(s, dtype=dtype, device="meta") for s in c["shapes"]]
    graph = encode_graph(make_fx(c["chain"], pre_dispatch=True)(*inputs), 0)
    places = [n.name for n in graph.nodes if not n.is_op]
    found, names = graph.subgraph([n.name for n in graph.nodes if n.is_op])
    return found, [places.index(n) for n in names]


def label(config):
    text = "{schedule} {BM}x{BN}x{BK} st{stages}".format(**config)
    extras = {"ctas": 1, "cluster": 1}
    return text + "".join(f" {k}{config[k]}" for k, plain in extras.items() if config.get(k, plain) != plain)


def compiled(c, graph, config, args):
    """The callable and its parameters; from the cache folder if it was compiled before."""
    kernel = TEMPLATES[c["template"]].kernel(graph, config, device(args.device))
    if args.device == "cpu":
        from fusescout.contenders.compile_cpu import compile_cpu

        return compile_cpu(kernel, Path(args.out), "-O1"), kernel
    import tilelang

    return tilelang.compile(kernel.func, target=TARGET, pass_configs=dict(kernel.pass_configs)), kernel


def compile_all(table, args):
    """(case, config, seconds or what went wrong) of every kernel."""
    jobs = []
    for name, c in table.items():
        graph, _ = subgraph(c)
        why = TEMPLATES[c["template"]].supports(graph, device(args.device))
        if why:
            print(f"{name}: not supported: {why}")
            continue
        jobs += [
            (name, c, graph, config)
            for config in TEMPLATES[c["template"]].configs(graph, device(args.device))[
                : min(args.limit, c.get("limit", args.limit))
            ]
        ]

    def one(job):
        name, c, graph, config = job
        start = time.monotonic()
        try:
            compiled(c, graph, config, args)
        except Exception as error:
            return name, config, f"{type(error).__name__}: {str(error).strip()[-300:]}"
        return name, config, round(time.monotonic() - start, 1)

    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(one, jobs))


# ---- the child ------------------------------------------------------------------------------------------------------


class Bench:
    """One case in the child: its tensors, its truth, and interleaved timing."""

    def __init__(self, name, args):
        self.c, self.args = {**CASES, **CPU_CASES}[name], args
        self.graph, order = subgraph(self.c)
        torch.manual_seed(0)
        k = self.c["mnk"][2]
        self.inputs = [
            torch.randn(s, device=args.device).mul(k**-0.5 if j and len(s) == 2 and s[1] == k else 1).bfloat16()
            for j, s in enumerate(self.c["shapes"])
        ]
        self.ordered = [self.inputs[i] for i in order]
        wide = torch.float64 if self.c["mnk"][0] <= 512 else torch.float32
        torch.backends.cuda.matmul.allow_tf32 = False
        self.truth = self.c["chain"](*(x.to(wide) for x in self.inputs))
        self.eager_error = self.error(self.c["chain"](*self.inputs))
        self.flush = torch.empty(1 if args.device == "cpu" else 2**26, dtype=torch.int32, device=args.device)

    def load(self, config):
        return {}

    def error(self, out):
        difference = (out.to(self.truth.dtype) - self.truth).abs()
        return float(difference.max()), float(difference.norm() / self.truth.norm())

    def kernel(self, config):
        function, kernel = compiled(self.c, self.graph, config, self.args)
        empty = {"dtype": torch.bfloat16, "device": self.args.device}
        outputs = [torch.full(o.shape, torch.nan, **empty) for o in self.graph.output_specs]
        tensors = {"input": self.ordered, "output": outputs}
        bound = [tensors[p.role][p.index].as_strided(p.shape, p.stride) for p in kernel.params]
        return lambda: function(*bound), outputs

    def times(self, functions):
        """Median ms of each function, taking turns, with the level-2 cache flushed before each."""
        for f in functions:
            f()
            f()
        if self.args.device == "cpu":
            rounds = [[self._wall(f) for f in functions] for _ in range(5)]
            return [round(median(r[j] for r in rounds), 5) for j in range(len(functions))]
        torch.cuda.synchronize()
        marks = []
        for number in range(ROUNDS):
            turn = list(enumerate(functions))
            for j, f in turn if number % 2 else reversed(turn):
                self.flush.zero_()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                f()
                end.record()
                marks.append((j, start, end))
        torch.cuda.synchronize()
        return [round(median(s.elapsed_time(e) for k, s, e in marks if k == j), 5) for j in range(len(functions))]

    def _wall(self, f):
        start = time.perf_counter()
        f()
        return (time.perf_counter() - start) * 1e3

    def measure(self, config):
        run, outputs = self.kernel(config)
        run()
        if self.args.device != "cpu":
            torch.cuda.synchronize()
        worst, relative = self.error(outputs[0])
        first = outputs[0].clone()
        found = {"max": worst, "rel": relative, "eager": self.eager_error}
        if not relative <= 2 * self.eager_error[1]:
            return {**found, "status": "wrong"}
        ms, bare = self.times([run, lambda: self.c["bare"](*self.inputs[:3])])
        same = bool(torch.equal(first, outputs[0]))
        return {**found, "status": "ok" if same else "not deterministic", "ms": ms, "bare_ms": bare}

    def rivals(self, config):
        """All ways to run the case, taking turns with the best config."""
        c, x = self.c, self.inputs
        functions = {"eager": lambda: c["chain"](*x), "bare": lambda: c["bare"](*x[:3])}
        if config:
            functions["best"] = self.kernel(config)[0]
        if c["rival"]:
            functions["lt"] = lambda: c["rival"](*x)
        if self.args.device != "cpu":
            module = torch.compile(c["chain"])
            functions["compile"] = lambda: module(*x)
        return dict(zip(functions, self.times(list(functions.values())), strict=True))


def serve(args):
    """Answer one JSON line per request line, until the parent closes the pipe."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not mix with the answers
    bench, name = None, None
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            with torch.no_grad():
                if request["case"] != name:
                    bench = None
                    bench, name = Bench(request["case"], args), request["case"]
                answer = getattr(bench, request["do"])(request["config"])
        except Exception as error:
            answer = {"status": "failed", "reason": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
        print(json.dumps(answer), file=out, flush=True)
        if "CUDA error" in answer.get("reason", "") or "launch failure" in answer.get("reason", ""):
            sys.exit(3)  # the context is poisoned


class Child:
    """The child process; started when needed, killed at a deadline."""

    def __init__(self, args):
        self.args, self.process, self.case = args, None, None

    def ask(self, case, do, config, deadline):
        if self.process is None or self.process.poll() is not None:
            self._start()
        if self.case != case:
            loaded = self._send({"case": case, "do": "load", "config": None}, LOAD_S)
            if loaded.get("status"):
                return loaded
            self.case = case
        return self._send({"case": case, "do": do, "config": config}, deadline)

    def _start(self):
        command = [sys.executable, __file__, "--serve", "--out", self.args.out, "--device", self.args.device]
        log = open(Path(self.args.out, "child.log"), "a")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.case = None
        self._receive(LOAD_S)

    def _send(self, request, deadline):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            return self.stop("crashed")
        return self._receive(deadline)

    def _receive(self, deadline):
        ready, _, _ = select.select([self.process.stdout], [], [], deadline)
        if not ready:
            return self.stop("timeout")
        line = self.process.stdout.readline()
        return json.loads(line) if line else self.stop("crashed")

    def stop(self, status="stopped"):
        if self.process:
            self.process.kill()
            self.process.wait()
            status = f"{status}" if status != "crashed" else f"crashed ({self.process.returncode})"
        self.process = self.case = None
        return {"status": status}


# ---- the parent -----------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="parts of case names, with commas between")
    parser.add_argument("--limit", type=int, default=16, help="configs of each case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=270, help="start nothing new after this time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry", action="store_true", help="compile only")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TILELANG_CACHE_DIR", str(Path(args.out, "cache").resolve()))
    if args.serve:
        return serve(args)
    begin, table = time.monotonic(), cases(args)
    builds = compile_all(table, args)
    bad = [(n, c, w) for n, c, w in builds if isinstance(w, str)]
    seconds = f"{time.monotonic() - begin:.0f} s with {args.jobs} threads"
    print(f"compiled {len(builds) - len(bad)} of {len(builds)} kernels in {seconds}", flush=True)
    for name, config, why in bad[:8]:
        print(f"  {name} | {label(config)}: {why}")
    if args.dry:
        for name, config, seconds in builds:
            print(f"  {name} | {label(config)}: {seconds if isinstance(seconds, float) else 'failed'}")
        return 1 if bad else 0
    child, results, broken = Child(args), {}, Counter()
    for name in table:
        rows = []
        for config in (c for n, c, w in builds if n == name and not isinstance(w, str)):
            if time.monotonic() - begin > args.seconds:
                rows.append({"config": config, "status": "not run: out of time"})
                continue
            kind = (config["schedule"], config.get("cluster", 1), config.get("ctas", 1))
            if broken[kind] >= 3:
                rows.append({"config": config, "status": "not run: its kind broke three times"})
                continue
            rows.append({"config": config, **child.ask(name, "measure", config, RUN_S)})
            broken[kind] += rows[-1]["status"] not in ("ok", "wrong")
        results[name] = {"configs": rows}
        save(args, results)
    for name, found in results.items():
        good = sorted((r for r in found["configs"] if r["status"] == "ok"), key=lambda r: r["ms"])
        if time.monotonic() - begin < args.seconds + 60:
            found["rivals"] = child.ask(name, "rivals", good[0]["config"] if good else None, RIVALS_S)
        show(name, table[name], found, good)
        save(args, results)
    child.stop()
    print(f"{time.monotonic() - begin:.0f} s in all")
    return 0


def save(args, results):
    Path(args.out, "gemm.json").write_text(json.dumps(results, indent=1))


def show(name, c, found, good):
    m, n, k = c["mnk"]
    rivals = found.get("rivals", {}).items()
    print(f"== {name} | ms: " + " ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in rivals))
    gemms = 2 if c["template"] == "gated_mlp" else 1
    for r in good[:4]:
        place, rate = found["configs"].index(r), 2e-9 * m * n * k * gemms / r["ms"]
        times = f"{r['ms']:.4f} (bare {r['bare_ms']:.4f}) {rate:5.0f} TF/s"
        print(f"   {label(r['config']):34s} {times} rel {r['rel']:.1e} / eager {r['eager'][1]:.1e} guess #{place + 1}")
    odd = [r for r in found["configs"] if r["status"] != "ok"]
    if odd:
        text = "; ".join(f"{label(r['config'])}: {r['status']} {r.get('reason', '')[:60]}" for r in odd)
        print(f"   {len(odd)} not ok: {text[:400]}")


if __name__ == "__main__":
    sys.exit(main())
