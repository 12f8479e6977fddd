import os, sys, time, torch, torch.distributed as dist
sys.path.insert(0,'benchmarks'); sys.path.insert(0,'src')
from pathlib import Path
if "RANK" not in os.environ:
    from virtual_cluster import launch, sliced_gpu
    with sliced_gpu(8) as sh:
        for mode in sys.argv[1].split(","):
            launch(Path(__file__),[mode],8,sh,120)
    sys.exit()
mode=sys.argv[1]; torch.cuda.set_device(0); r=int(os.environ["RANK"])
dist.init_process_group("nccl",device_id=torch.device("cuda",0))
from overhead import Size
from overhead_systems import PAIRS
pair,which=mode.split(":")
f=list(PAIRS[pair].values())[int(which)]
step=f(Size(hidden=1280,layers=8,heads=16,length=512,batch=8))
step();step(); torch.cuda.synchronize(); dist.barrier()
t=time.perf_counter()
for _ in range(3): step(); torch.cuda.synchronize()
if r==0: print(mode,"iteration",(time.perf_counter()-t)/3,flush=True)
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as p:
    step(); torch.cuda.synchronize()
if r==0:
    print(p.key_averages().table(sort_by="self_cuda_time_total",row_limit=14,max_name_column_width=60),flush=True)
    print(p.key_averages().table(sort_by="self_cpu_time_total",row_limit=10,max_name_column_width=60),flush=True)
    if os.environ.get("OUT"): p.export_chrome_trace(os.environ["OUT"]+f"/{pair}{which}.json")
dist.barrier(); os._exit(0)
