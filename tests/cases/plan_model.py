"""A file of models, as a user of scripts/plan_model.py has it, and commands to be refused."""

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Linear):
    def forward(self, x):
        return x + F.gelu(super().forward(x))


class Model(nn.Module):
    def __init__(self, layers=4, width=16):
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.1, layers)]  # needs values
        self.table, self.head = nn.Embedding(99, width), nn.Linear(width, 99)
        self.layers = nn.ModuleList([Block(width, width) for _ in rates])

    def forward(self, ids, labels=None):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LogitsOnly(Model):
    def forward(self, x):
        return super().forward(x)


class Routed(Model):
    def forward(self, ids, labels):
        x = self.table(ids)
        return self.head(x[x.sum(-1) > 0]).sum()


class Fails(Model):
    def forward(self, ids):
        raise KeyError("no such expert")


def needs(width): return Model(width=width)
def number(): return 7
def batch(): return 1, torch.zeros(2, 3).long()
def words(): return "a batch"
def text_loss(output, batch): return "loss"
def loss(output, batch): return output[1]
def wide(): return nn.Linear(8, 9)
def frozen(): return Model().requires_grad_(False)
def no_optimizer(parameters): return None
def stranger(parameters): return torch.optim.SGD([nn.Parameter(torch.ones(2))])
def exits(): raise SystemExit("usage: mine")
def later(parameters): return torch.optim.NoSuch(parameters)
def bare(): return torch.optim.SGD([])
def moved(): return Model().to("cuda")
def pair(): return torch.zeros(4, 8), torch.zeros(4).long()
def of_pair(output, pair): return F.cross_entropy(output, pair[1])
"""
OF_LIBRARIES = """
import torch
from torch import nn


@torch.library.custom_op("mine::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


scale.register_fake(torch.empty_like)
scale.register_autograd(lambda ctx, grad: 2 * grad)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.lstm = nn.Conv1d(8, 8, 1), nn.LSTM(8, 8)
        self.enc, self.dec = (nn.Sequential(*[nn.Linear(8, 8) for _ in "12"]) for _ in "12")

    def forward(self, x):
        return scale(self.lstm(self.dec(self.enc(self.conv(x))))[0]).sum()


def batch(): return torch.zeros(2, 8, 8)
"""
M = "mine.py:Model"
# What is wrong -> (command, what the error line must have)
REFUSED = {
    "no arguments": ("", "required"),
    "no input": (M, "--input"),
    "no such file": ("their.py:Model --input 2x8", "MODEL their.py:Model"),
    "no function": ("mine.py --input 2x8", "FILE.py:FUNCTION"),
    "no such function": ("mine.py:Modle --input 2x8", "mine.py has no function 'Modle'"),
    "not a Python file": ("notes.txt:Model --input 2x8", "MODEL notes.txt:Model"),
    "no config.json": (". --input 2x8", "config.json"),
    "a config.json that is none": ("config.json --input 2x8", "JSON"),
    "syntax error": ("broken.py:Model --input 2x8", "broken.py"),
    "import error": ("imports.py:Model --input 2x8", "imports.py:1: import no_such_module"),
    "a model that needs arguments": ("mine.py:needs --input 2x8", "width"),
    "unknown argument": (f"{M} --input 2x8 --with depth=3", "depth"),
    "--with without a value": (f"{M} --input 2x8 --with layers", "NAME=VALUE"),
    "no module": ("mine.py:number --input 2x8", "no nn.Module"),
    "exits": ("mine.py:exits --input 2x8", "usage: mine"),
    "no shape": (f"{M} --input 2*8", "--input 2*8"),
    "no rows": (f"{M} --input 0x8", "--input 0x8"),
    "ids without a table": ("mine.py:wide --input 2x8", "nn.Embedding"),
    "no batch": (f"{M} --input mine.py:words", "--input: a dict of arguments, or a tuple"),
    "another batch": (f"{M} --input mine.py:batch", "mine.py:"),
    "no loss": ("mine.py:LogitsOnly --input 2x8", "--loss: "),
    "a loss of text": (f"{M} --input 2x8 --loss mine.py:text_loss", "--loss: "),
    "no such loss": (f"{M} --input 2x8 --loss mine.py:lost", "--loss mine.py:lost"),
    "forward fails": ("mine.py:Fails --input 2x8", "no such expert"),
    "data-dependent": ("mine.py:Routed --input 2x8", "return self.head(x[x.sum(-1) > 0]).sum()"),
    "no such blocks": (f"{M} --input 2x8 --blocks h", "--blocks h: "),
    "nothing to freeze": (f"{M} --input 2x8 --freeze lora*", "--freeze lora*"),
    "all frozen": ("mine.py:frozen --input 2x8", "none of its weights is trained"),
    "no optimizer": (f"{M} --input 2x8 --optimizer mine.py:no_optimizer", "--optimizer: "),
    "no such optimizer": (f"{M} --input 2x8 --optimizer adam", "--optimizer adam"),
    "an optimizer of other weights": (
        f"{M} --input 2x8 --optimizer mine.py:stranger",
        "--optimizer: ",
    ),
    "an optimizer that fails": (f"{M} --input 2x8 --optimizer mine.py:later", "NoSuch"),
    "an optimizer of nothing": (
        f"{M} --input 2x8 --optimizer mine.py:bare",
        "--optimizer mine.py:bare: TypeError",
    ),
    "muon without blocks": (
        "mine.py:wide --input mine.py:pair --optimizer muon",
        "muon: it is for the matrices of blocks",
    ),
    "on a GPU": ("mine.py:moved --input 2x8", "leave .to(device) out"),
    "no such card": (f"{M} --input 2x8 --card 9999", "--card"),
    "a card and another device": (f"{M} --input 2x8 --card L4 --device cpu", "--device cpu"),
    "no folder to write to": (f"{M} --input 2x8 --json no/such.json", "--json"),
}
