import os

import sys

sys.path.insert(0, ".")
import torch, devalloc, numpy as np, sys, time
from devalloc.heap import Heap

h = Heap("8MiB")
t = time.time()
a = h.malloc(torch.full((300,), 64).cuda())
print(a[:5] - a[0], (a == 0).sum())
h.check()
h.audit()
h.free(a)
h.check()
h.audit()
print(h.stats().used, h.stats().largest_free == h.stats().capacity)
g = torch.Generator().manual_seed(1)
for r in range(4):
    s = torch.randint(1, 6000, (300,), generator=g).cuda()
    a = h.malloc(s)
    h.check()
    h.audit()
    p = torch.randperm(300, generator=g)
    h.free(a[p[:150]])
    h.check()
    h.audit()
    b = h.malloc(s[p[:150]])
    h.check()
    h.audit()
    h.free(a[p[150:]])
    h.free(b)
    h.check()
    h.audit()
    print(r, h.stats().used, h.stats().largest_free, time.time() - t)
a = h.malloc(torch.tensor([8 << 20]).cuda())
print(a)
h.check()
h.audit()
h.free(a)
h.check()
h.audit()
a = h.malloc(torch.tensor([100000, 70000, 65536, 40000]).cuda())
h.audit()
h.free(a)
h.free(a)
try:
    h.check()
except Exception as e:
    print(repr(e))
h.audit()
