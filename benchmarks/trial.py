"""First trial of the fused losses on a GPU."""

import json, os, sys, time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "src")]
import torch, triton
import fmicl
from fmicl.kernels import views
from fmicl.losses import fused
from fmicl.utils.triton import compile_in_parallel, CachedLaunch
from wall import LOSSES, measure_wall, raw_inputs

T0 = time.time()
out = open(os.path.join(os.environ.get("OUT", "/tmp"), "trial.txt"), "w")


def say(*a):
    line = f"[{time.time() - T0:5.1f}] " + " ".join(map(str, a))
    print(line, flush=True)
    out.write(line + "\n")
    out.flush()


D = "cuda"


def clear():
    fused._fmicl.cache_clear()
    fused._infonce.cache_clear()


def run(f, x, y, wx=True, wy=True):
    x = x.detach().clone().requires_grad_(wx)
    y = y.detach().clone().requires_grad_(wy)
    v = f(x, y)
    (2 * v).backward()
    return v.detach(), x.grad, y.grad


say(torch.__version__, triton.__version__, torch.cuda.get_device_name())
cases = [
    ("kl", "anchor"),
    ("js", "both"),
    ("vlc", "cross"),
    ("tsallis", "anchor"),
    ("infonce", "both"),
    ("infonce", "cross"),
    ("infonce", "anchor"),
]


def mk(name, mode, **o):
    return fmicl.InfoNCELoss(0.5, mode, **o) if name == "infonce" else fmicl.FMICLLoss(name, negatives=mode, **o)


shapes = [(300, 96), (512, 512)]
timed = [(16, 128), (256, 128), (512, 512), (4096, 128), (4096, 512)]


def all_calls():
    for n, d in shapes:
        for dt in (torch.float32, torch.bfloat16):
            x, y = raw_inputs(n, d, D, dt)
            for name, mode in cases if (n, d) != (512, 512) else cases[:1] + cases[4:5]:
                try:
                    run(mk(name, mode), x, y)
                except Exception as e:
                    say("compile", n, d, name, type(e).__name__, str(e)[:300])
    for n, d in timed:
        for dt in (torch.float32, torch.bfloat16):
            x, y = raw_inputs(n, d, D, dt)
            for name, mode in (("kl", "anchor"), ("infonce", "both")):
                for small in (2**31, 2**40, 0):
                    views._LARGEST_SMALL = small
                    clear()
                    if small == 2**40 and n < 4096:
                        continue
                    try:
                        run(mk(name, mode), x, y)
                    except Exception as e:
                        say("compile", n, d, name, small, type(e).__name__, str(e)[:300])
    views._LARGEST_SMALL = 2**31
    clear()


with compile_in_parallel():
    all_calls()
torch.cuda.synchronize()
say("compiled")
clear()
for n, d in shapes:
    for dt in (torch.float32, torch.bfloat16):
        x, y = raw_inputs(n, d, D, dt)
        for name, mode in cases if (n, d) != (512, 512) else cases[:1] + cases[4:5]:
            for small in (2**31, 0):
                if small == 0 and name in ("vlc", "tsallis"):
                    continue
                views._LARGEST_SMALL = small
                clear()
                try:
                    f = mk(name, mode)
                    a = run(f, x, y)
                    a2 = run(f, x, y)
                    b = run(mk(name, mode, kernel="reference"), x.float(), y.float())
                    errs = [float((p.float() - q).norm() / q.norm()) for p, q in zip(a, b)]
                    same = all(torch.equal(p, q) for p, q in zip(a, a2))
                    say(n, d, dt, name, mode, "small" if small else "large", ["%.1e" % e for e in errs], "bits", same)
                except Exception as e:
                    say("FAIL", n, d, dt, name, mode, small, type(e).__name__, str(e)[:500])
views._LARGEST_SMALL = 2**31
clear()
# CUDA graph
try:
    x, y = raw_inputs(512, 512, D, torch.bfloat16)
    f = mk("infonce", "both")
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        for _ in range(3):
            x.grad = y.grad = None
            f(x, y).backward()
    torch.cuda.synchronize()
    want = x.grad.clone()
    g = torch.cuda.CUDAGraph()
    x.grad = y.grad = None
    with torch.cuda.graph(g):
        v = f(x, y)
        v.backward()
    g.replay()
    torch.cuda.synchronize()
    say("graph", torch.equal(want, x.grad))
except Exception as e:
    say("FAIL graph", type(e).__name__, str(e)[:300])
# wall clock
for n, d in timed:
    for dt in (torch.bfloat16, torch.float32):
        for key in ("kl", "ntxent"):
            ours, dense = LOSSES[key]
            x, y = raw_inputs(n, d, D, dt)
            res = {}
            for small in (2**31, 2**40, 0):
                if small == 2**40 and n < 4096:
                    continue
                views._LARGEST_SMALL = small
                clear()
                try:
                    res["ours<%.0e" % small] = measure_wall(ours(), (x, y), 0.15)["seconds"] * 1e3
                except Exception as e:
                    res["ours<%.0e" % small] = type(e).__name__
            views._LARGEST_SMALL = 2**31
            clear()
            res["dense"] = measure_wall(dense, (x, y), 0.15)["seconds"] * 1e3
            say(n, d, dt, key, {k: v if isinstance(v, str) else round(v, 3) for k, v in res.items()})
# where the time goes
x, y = raw_inputs(512, 512, D, torch.bfloat16)
for key in ("kl", "ntxent"):
    f = LOSSES[key][0]()

    def step():
        x.grad = y.grad = None
        f(x, y).backward()

    for _ in range(20):
        step()
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(300):
        v = f(x, y)
    a = (time.perf_counter() - t) / 300
    torch.cuda.synchronize()
    with torch.no_grad():
        t = time.perf_counter()
        for _ in range(300):
            v = f(x, y)
        c = (time.perf_counter() - t) / 300
        torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(300):
        step()
    b = (time.perf_counter() - t) / 300
    torch.cuda.synchronize()
    say(key, "us: forward %.0f, no_grad forward %.0f, whole %.0f" % (a * 1e6, c * 1e6, b * 1e6))
    import cProfile, pstats, io

    p = cProfile.Profile()
    p.enable()
    for _ in range(300):
        v = f(x, y)
    p.disable()
    torch.cuda.synchronize()
    buf = io.StringIO()
    pstats.Stats(p, stream=buf).sort_stats("tottime").print_stats(22)
    say(buf.getvalue())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as prof:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
    for ev in prof.key_averages():
        dt_ = getattr(ev, "device_time_total", 0)
        if dt_ > 0:
            say("   gpu us", ev.key[:60], round(dt_ / 20, 1), ev.count)
# the launch alone
plan = views.ViewLossPlan(
    views.ViewLoss.infonce(2.0, "both", False), 512, 512, torch.device("cuda", 0), True, (True, True)
)
xx, yy = x.detach(), y.detach()
for _ in range(3):
    r, st = plan.forward(xx, yy)
torch.cuda.synchronize()
t = time.perf_counter()
for _ in range(500):
    plan._unit(xx, yy, st.units, st.scratch, *plan._unit_numbers)
say("a cached launch us", (time.perf_counter() - t) / 500 * 1e6)
torch.cuda.synchronize()
t = time.perf_counter()
for _ in range(500):
    torch.empty(1024, 512, dtype=torch.bfloat16, device="cuda")
say("an empty us", (time.perf_counter() - t) / 500 * 1e6)
# compiled dense
torch._dynamo.config.cache_size_limit = 64
for n, d, dt in ((512, 512, torch.bfloat16), (16, 128, torch.float32)):
    for key in ("kl", "ntxent"):
        if time.time() - T0 > 52:
            continue
        x, y = raw_inputs(n, d, D, dt)
        c = torch.compile(LOSSES[key][1])
        say("compiled", n, d, dt, key, round(measure_wall(c, (x, y), 0.2)["seconds"] * 1e3, 3))
