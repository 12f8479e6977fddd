import sys, itertools, json, tempfile, warnings, gc
warnings.filterwarnings("ignore")
import torch, transformers
from transformers import *
from transformers import logging; logging.set_verbosity_error()
from galvatron.spec.model import *
from galvatron.zoo import load_model
torch.backends.cuda.matmul.allow_tf32=False
S,V=512,1000
def bert(L,p): return BertForMaskedLM, BertConfig(hidden_size=1024,num_hidden_layers=L,num_attention_heads=16,intermediate_size=4096,vocab_size=V,hidden_dropout_prob=p,attention_probs_dropout_prob=p),'encoder'
def gpt2(L,p): return GPT2LMHeadModel, GPT2Config(n_embd=1024,n_layer=L,n_head=16,vocab_size=V,resid_pdrop=p,embd_pdrop=p,attn_pdrop=p,use_cache=False,bos_token_id=0,eos_token_id=0),'decoder'
def llama(L,p): return LlamaForCausalLM, LlamaConfig(hidden_size=1024,num_hidden_layers=L,num_attention_heads=16,num_key_value_heads=4,intermediate_size=2816,vocab_size=V,attention_dropout=p,use_cache=False),'decoder'
def t5e(L,p): return T5ForConditionalGeneration, T5Config(d_model=1024,d_kv=64,num_layers=L,num_decoder_layers=1,num_heads=16,d_ff=4096,vocab_size=V,dropout_rate=p,use_cache=False,decoder_start_token_id=0,pad_token_id=0),'encoder'
def t5d(L,p): return T5ForConditionalGeneration, T5Config(d_model=1024,d_kv=64,num_layers=1,num_decoder_layers=L,num_heads=16,d_ff=4096,vocab_size=V,dropout_rate=p,use_cache=False,decoder_start_token_id=0,pad_token_id=0),'decoder'
def vit(L,p): return ViTForImageClassification, ViTConfig(hidden_size=1024,num_hidden_layers=L,num_attention_heads=16,intermediate_size=4096,hidden_dropout_prob=p,attention_probs_dropout_prob=p),'encoder'
def swin(L,p): return SwinForImageClassification, SwinConfig(embed_dim=320,depths=[L,1],num_heads=[10,20],hidden_dropout_prob=p,attention_probs_dropout_prob=p),'stage1'
def inputs(cls,B,dt):
    if 'Image' in cls.__name__: return dict(pixel_values=torch.randn(B,3,224,224,device='cuda',dtype=dt),labels=torch.zeros(B,dtype=torch.long,device='cuda'))
    ids=torch.randint(1,V,(B,S),device='cuda'); return dict(input_ids=ids,labels=ids)
def build(f,L,p,a,dt):
    cls,cfg,blk=f(L,p); cfg._attn_implementation=a
    
    with torch.device('cuda'): m=cls(cfg)
    m=m.to(dt).train()
    return m,cls,cfg,blk
def saved(m,inp):
    fixed={t.untyped_storage().data_ptr() for t in (*m.parameters(),*m.buffers())}; kept={}
    def pack(t):
        st=t.untyped_storage()
        if st.data_ptr() not in fixed: kept[st.data_ptr()]=(st.nbytes(),)
        return t.detach()
    with torch.autograd.graph.saved_tensors_hooks(pack,lambda t:t): out=m(**inp)
    return sum(v[0] for v in kept.values())
def peak(m,inp):
    for _ in range(2):
        torch.cuda.synchronize(); gc.collect()
        a=torch.cuda.memory_allocated()
        out=m(**inp); b=torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats(); out.loss.backward(); pk=torch.cuda.max_memory_allocated()
        del out
        for q in m.parameters(): q.grad.zero_() if q.grad is not None else None
    return b-a, pk-b

F=torch.nn.functional; orig=F.scaled_dot_product_attention
def sdpa(q,k,v,attn_mask=None,**kw): return orig(q,k,v,attn_mask=None if attn_mask is None else attn_mask.contiguous(),**kw)
F.scaled_dot_product_attention=sdpa
B=int(sys.argv[1])
for f,a,p,pr in itertools.product([bert,gpt2,llama,t5e,t5d,vit,swin],['eager','sdpa'],[0.0,0.1],Precision):
    dt=torch.float32 if pr is Precision.FP32 else torch.bfloat16
    try:
        m,cls,cfg,blk=build(f,4,p,a,dt); inp=inputs(cls,B,dt); fwd,back=peak(m,inp)
        with tempfile.TemporaryDirectory() as d:
            cfg.save_pretrained(d)
            s=load_model(__import__('pathlib').Path(d),Training(precision=pr,attention=Attention.FUSED if a=='sdpa' else Attention.EAGER,sequence_length=None if 'Image' in cls.__name__ else S))
        b=next(k for k in s.kinds if k.name==blk); u=(b.boundary_bytes if f is not t5d else b.boundary_bytes//2)*B
        # predicted peak: saved of all layers, or at the last block when the head is done with its own
        head=s.layers[-1]; order=[l for l in s.layers]
        pred=0; rest=s.activation_bytes
        for l in reversed(order): pred=max(pred,rest+l.transient_bytes); rest-=l.activation_bytes
        print(json.dumps([f.__name__,a,p,str(pr),fwd,fwd+back]), f"fwd/u {fwd/u:.2f} err {s.activation_bytes*B/fwd-1:+.3f} back/u {back/u:.2f} block tr/u {b.transient_bytes*B/u:.2f} head saved/u {head.activation_bytes*B/u:.2f} peak err walk {pred*B/(fwd+back)-1:+.3f} simple {(s.activation_bytes+max(k.transient_bytes for k in s.kinds))*B/(fwd+back)-1:+.3f}",flush=True)
        del m
    except Exception as e: print(f.__name__,a,p,pr,'ERR',type(e).__name__,str(e)[:200],flush=True)
    gc.collect(); torch.cuda.empty_cache()
