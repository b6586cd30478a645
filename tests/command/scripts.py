"""Training scripts of users, for tests: plain PyTorch, Lightning, the Trainer of Hugging Face, and accelerate.

Each performs 30 steps on 4 ranks, and is exact: the batch of a step depends only on the step and the rank. The model
has one parameter, because DDP sums several parameters in another order in the first step of a process. At the end, rank
0 writes the weights to `result.txt`. The environment variable STEP_S is the pause after each step in seconds.
"""

DDP = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sluice

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
first = 1
if path := sluice.last_saved():
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
for step in range(first, 31):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(float(os.environ.get("STEP_S", "0")))
    sluice.step(step, 30, loss=loss)
    is_stopping = sluice.should_stop()
    if rank == 0 and (step % 3 == 0 or is_stopping):
        os.makedirs("checkpoints", exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, "checkpoints/temporary")
        os.replace("checkpoints/temporary", f"checkpoints/{step:03d}.pt")
        sluice.saved(f"checkpoints/{step:03d}.pt")
    if is_stopping:
        sys.exit()
if rank == 0:
    open("result.txt", "w").write(repr([p.detach().flatten().tolist() for p in model.parameters()]))
"""

LIGHTNING = """
import os, time
import torch
import lightning.pytorch as pl
import sluice
from sluice.lightning import SluiceCallback

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)

class Loader(torch.utils.data.DataLoader):
    "A loader with a state, as torchdata.StatefulDataLoader, so that Lightning continues in the middle of an epoch."
    first = position = 0
    def __iter__(self):
        first, self.first = self.first, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.position = number + 1
                yield batch
    def state_dict(self):
        return {"position": self.position % len(self)}
    def load_state_dict(self, state):
        self.first = state["position"]

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1, bias=False)
    def training_step(self, batch, index):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        x, y = batch
        return (self.layer(x) - y).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

pl.seed_everything(1, verbose=False)
ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = pl.Trainer(
    max_epochs=6, accelerator="cpu", devices=ranks_per_node, strategy="ddp", logger=False,
    num_nodes=int(os.environ["WORLD_SIZE"]) // ranks_per_node,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[SluiceCallback(every_n_steps=3)],
)
model = Model()
loader = Loader(Data(), batch_size=4, shuffle=False)
trainer.fit(model, loader, ckpt_path=sluice.last_saved(), weights_only=False)
if trainer.is_global_zero:
    open("result.txt", "w").write(repr([p.detach().flatten().tolist() for p in model.parameters()]))
"""

TRANSFORMERS = """
import os, time
import torch
from transformers import Trainer, TrainingArguments
import sluice
from sluice.transformers import SluiceCallback

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().reshape(1)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1, bias=False)
    def forward(self, x, labels):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        return {"loss": (self.layer(x) - labels).square().mean()}

torch.manual_seed(1)
model = Model()
trainer = Trainer(
    model=model, train_dataset=Data(), callbacks=[SluiceCallback()],
    args=TrainingArguments(
        output_dir="checkpoints", max_steps=30, per_device_train_batch_size=4, save_steps=3, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, seed=1, save_total_limit=3, learning_rate=0.01,
    ),
)
trainer.train(resume_from_checkpoint=sluice.last_saved())
if trainer.is_world_process_zero():
    open("result.txt", "w").write(repr([p.detach().flatten().tolist() for p in model.parameters()]))
"""

ACCELERATE = """
import os, time
import torch
from accelerate import Accelerator
from sluice.accelerate import SluiceHook

accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
model = torch.nn.Linear(8, 1, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
hook = SluiceHook(accelerator, every_n_steps=3)
for step in range(hook.resume() + 1, 31):
    seed = 100 * step + accelerator.process_index
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    time.sleep(float(os.environ.get("STEP_S", "0")))
    hook.end_step(step, 30, loss=loss)
if accelerator.is_main_process:
    open("result.txt", "w").write(repr([p.detach().flatten().tolist() for p in model.parameters()]))
"""

SCRIPTS = {"ddp": DDP, "lightning": LIGHTNING, "transformers": TRANSFORMERS, "accelerate": ACCELERATE}
