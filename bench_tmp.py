import sys; sys.path.insert(0,'benchmarks')
import torch, time, statistics, runtime as B
from thdprof.runtime import GraphedModule
x=B.make_input(); packs=B.distribution(16,at_most=60)
stack=B.make("torch"); g=GraphedModule(stack,B.buckets((64,)),sample_every=0)
t=B.through(g,x); t(packs[0])
cap=list(g._bank.slots[0].passes.values())[0]; slot=g._bank.slots[0]
other=B.make("torch")
for p in other.parameters(): p.grad=torch.zeros_like(p)
hand=B.hand_written(other,x,64)
host=packs[0].host
b=B.buckets((64,))[0]
def only(p): cap.forward.replay(); cap.backward.replay()
def staged(p): slot.stage([x],p.host,b); cap.forward.replay(); cap.backward.replay()
def lease(p):
    l=g._bank.lease(b); o=l.forward([x],p.host); l.backward([x.detach()])
def noaccx(p):
    x.grad=None; t(p)
print(B.interleaved({"hand":hand,"only":only,"staged":staged,"lease":lease,"full":t,"noaccx":noaccx},packs,repeat=9))
# host time
for name,f in (("hand",hand),("only",only),("lease",lease),("full",t)):
    torch.cuda.synchronize(); t0=time.perf_counter()
    for p in packs[:3]: f(p)
    t1=time.perf_counter(); torch.cuda.synchronize(); print(name,"host us",(t1-t0)/3*1e6)
