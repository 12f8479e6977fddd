import os, sys, time, torch, torch.distributed as dist
sys.path.insert(0,'benchmarks')
from pathlib import Path
if "RANK" not in os.environ:
    from virtual_cluster import launch, sliced_gpu
    with sliced_gpu(8) as sh:
        for mode in ("bound","unbound"):
            launch(Path(__file__),[mode],8,sh,120)
    sys.exit()
mode=sys.argv[1]; torch.cuda.set_device(0); r=int(os.environ["RANK"])
if mode=="bound": dist.init_process_group("nccl",device_id=torch.device("cuda",0))
else: dist.init_process_group("nccl")
def say(*a):
    if r==0: print(mode,*a,flush=True)
groups={"world":None,"new8":dist.new_group(list(range(8)))}
g4=[dist.new_group(list(range(i,i+4))) for i in (0,4)]; groups["new4"]=g4[r//4]
g2=[dist.new_group([i,i+1]) for i in range(0,8,2)]; groups["new2"]=g2[r//2]
def bench(f,n=6):
    f(); torch.cuda.synchronize(); dist.barrier(); t=time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); dist.barrier(); return (time.perf_counter()-t)/n
for mb in (1,21,80):
    x=torch.randn(mb*250000,device="cuda")
    for name,g in groups.items():
        def sync(): dist.all_reduce(x,group=g)
        def asyn(): dist.all_reduce(x,group=g,async_op=True).wait()
        n=dist.get_world_size(g) if g is not None else 8
        o=torch.empty_like(x); part=torch.empty(x.numel()//n,device="cuda")
        def rsag(): dist.reduce_scatter_tensor(part,x[:part.numel()*n],group=g); dist.all_gather_into_tensor(o[:part.numel()*n],part,group=g)
        say(mb,"MB",name,"AR sync %.4f"%bench(sync),"async %.4f"%bench(asyn),"RS+AG %.4f"%bench(rsag))
# p2p ring neighbours pairs: even->odd
x=torch.randn(2_620_000//4*1,device="cuda")
def p2p_group():
    g=groups["new2"]
    (dist.send if r%2==0 else dist.recv)(x, r^1, group=g)
def p2p_world():
    op=dist.P2POp(dist.isend if r%2==0 else dist.irecv, x, r^1)
    for w in dist.batch_isend_irecv([op]): w.wait()
say("p2p 2.6MB group %.4f"%bench(p2p_group,10),"world batch %.4f"%bench(p2p_world,10))
dist.destroy_process_group()
