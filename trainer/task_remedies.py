"""The fixes for the common mistakes in a task's code, by the text of the error."""

import math
import re
from collections.abc import Callable


def _of_matrix(match: re.Match[str]) -> str:
    """Return the cure for a matrix (rows, columns) that does not fit a layer with (wanted, outs).

    If each example has several rows, a model of pictures lacks nn.Flatten().
    """
    rows, columns, wanted, outs = map(int, match.groups()[:4])
    shape = [int(size) for size in (match[5] or "").split(",") if size.strip()]
    numbers = rows * columns // shape[0] if shape else 0
    if len(shape) > 1 and rows != shape[0] and (len(shape) > 3 or numbers == wanted):
        layer = f"nn.Linear({numbers}, {outs})"
        return f"put nn.Flatten() before the layer, and write {layer} for all numbers of an example"
    return f"the layer gets {columns} numbers for each example: write nn.Linear({columns}, {outs})"


def _of_whole_batch(match: re.Match[str]) -> str:
    """Return the cure for a model that is called with the whole batch, a tuple."""
    name, count = match[1], int(match[2])
    names = ["inputs", "targets"][:count] if count < 3 else ["inputs", "targets", "*others"]
    return f"unpack the batch, as in {', '.join(names)}{',' * (count == 1)} = {name}"


def _of_fixed_batch(match: re.Match[str]) -> str:
    """Return the cure for a view of a smaller last batch to sizes that begin with a whole one."""
    first, *sizes = (int(size) for size in match[1].split(","))
    others, count = math.prod(size for size in sizes if size != -1), int(match[2])
    fits = others > 0 and count % others == 0 and (-1 in sizes or count // others < first)
    return _IF_FIXED.format(first) if sizes and fits else ""


_IF_FIXED = (
    "batches have different numbers of examples: if {} is written there, write x.shape[0] instead"
)
# The forms of a norm, by the number of dimensions of its inputs.
_FORMS = {"2": "1d", "3": "1d", "4": "2d", "5": "3d"}
# Patterns of torch's and Python's errors for common mistakes, with the fix. The first match counts.
_REMEDIES: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"takes 0 positional arguments but 1 was given": (
        "a method of a class needs self as its first parameter"
    ),
    r"import raised (?:TypeError: \w+\.__init__\(\) missing .*|FrozenInstanceError: .*)'(\w+)'": (
        r"remove __init__() and write \1: int = 32 in the class, with the type and default of \1"
    ),
    r"^load_state_dict\(\) raised \w+: (?!.*loading state_dict)": (
        "the model has a load_state_dict() of its own, which a resume calls with the weights: "
        "rename it"
    ),
    r"loading state_dict ": (
        "remove load_state_dict() and give the file with --init, which loads the tensors whose "
        "names and shapes fit, also from an entry state_dict and without module."
    ),
    r"Can't call numpy\(\) on Tensor that requires grad": (
        "a loss needs the functions of torch, as torch.square instead of numpy.square: remove "
        ".numpy()"
    ),
    r"modified by an inplace operation": (
        "losses() only returns the losses: remove backward() and step() from it; if it has none, "
        "write h = h + 1 instead of h += 1, and leave out inplace=True and the functions that end "
        "in _"
    ),
    r"Float and (?:Half|BFloat16)|(?:Half|BFloat16) and Float": (
        "half precision meets float32: remove .half() and .bfloat16(), and use --precision bf16"
    ),
    r"build_optimizer\(\) raised AttributeError: .* attribute '(\w*(?:parameters|modules))'": (
        r"write model.\1(): the task is not the model"
    ),
    r"build_optimizer\(\) raised TypeError: '<=?' not supported between .*NoneType": (
        "weight_decay is None without --weight-decay: write weight_decay = 0.01 in the class for "
        "a default"
    ),
    r"schedule\(\) raised KeyError: .*\(.*validations has": (
        "a key of validations is one of these names, which metrics() returns"
    ),
    r"schedule\(\) raised (?:IndexError|ValueError: m\w+\(\)).*no validation yet": (
        "validations is empty until the first one: if schedule() reads it without a check, begin "
        "with `if not validations: return 1.0`"
    ),
    r"schedule\(\) raised ZeroDivisionError": (
        "a divisor is 0, such as step at the start, or warmup_steps without --warmup-epochs: write "
        "max(1, DIVISOR)"
    ),
    r"forward\(\) missing .*\(the model got (?!a )": (
        "a Classification calls model(inputs): return ((x, mask), labels) from the dataset, and "
        "unpack the pair in forward(self, inputs)"
    ),
    r"elements of input should be between 0 and 1": (
        "the outputs are logits: use F.binary_cross_entropy_with_logits, or a sigmoid as the last "
        "layer"
    ),
    r"elements of target should be between 0 and 1": (
        "the targets of a binary cross-entropy are from 0 to 1: use F.cross_entropy for more than "
        "two classes"
    ),
    r"Boolean value of Tensor.* in (\w+Loss)\.__init__\b": (
        r'nn.\1(...) takes options: write nn.\1(reduction="none")(output, targets)'
    ),
    r"must be Tensor, not (ReLU|\w*[a-z]LU|Tanh|Sigmoid|Flatten|Dropout)\b": (
        r"nn.\1(...) takes options: write nn.\1()(x)"
    ),
    r'"(?:log_softmax\w*|host_softmax)" not implemented for .* in .*\bcross_entropy\b': (
        "cross_entropy takes the output of the model before the labels: swap the two arguments"
    ),
    r"multi-target not supported": (
        "the labels have more dimensions than the loss of an output (B, K) takes: remove a "
        "dimension of size 1 with .squeeze(1), or return an output (B, K, ...) for labels (B, ...)"
    ),
    r"got (Long|Int) and Float": (
        "the inputs are whole numbers: convert them with .float(), or return (inputs, labels) from "
        "the dataset if the pair is swapped"
    ),
    r"the model got (?:text|a tuple of \d+ \(text|a list of \d+ \(text)": (
        "turn text into numbers in __getitem__() of the dataset or in collate()"
    ),
    r"(?:must be Tensor, not (?:tuple|list)|'(?:tuple|list)' object has no attribute).*; "
    r"(\w+) is a (?:tuple|list) of (\d+)\)": _of_whole_batch,
    r"must be Tensor, not dict.*; (\w+) is a dict of (\w+)": (
        r"give the model the tensor of a key, as in model(\1['\2'])"
    ),
    r"must be Tensor, not (?:tuple|list)": (
        "if this is text, turn it into numbers in __getitem__() or collate(); if this is the "
        "output of the model, take the tensor out of it"
    ),
    r"too many dimensions 'str'": (
        "a tensor has no text: turn each text into a number, as in names.index(text)"
    ),
    r"unsupported operand type\(s\) for \+: '\w*Path' and 'str'"
    r"|can only concatenate str \(not \"\w*Path\"\)|'str' and '\w*Path'": (
        "data_dir is a Path: write data_dir / 'NAME'"
    ),
    r"KeyError: .*\(.*totals has": "use one of these names, or return the name from statistics()",
    r"before Module.__init__\(\) call": "begin __init__() of the model with super().__init__()",
    r"No module named '([^'.]+)": (
        r"install the package that has \1 in the environment of Trainbox, or put \1.py beside the "
        r"task"
    ),
    r"Weights only load failed": (
        "the file has more than tensors: save model.state_dict() instead of the model, or use "
        "weights_only=False for a file that you trust"
    ),
    r"(statistics|predictions|figures)\(\) raised RuntimeError: "
    r"(element 0 of tensors|One of the differentiated Tensors) does not require grad": (
        "gradients are off in a validation: write `with torch.enable_grad():` around what needs "
        "them, also in losses() if statistics() calls it"
    ),
    r"expected .*D input \(got ([2-5])D input\)": lambda match: (
        f"this norm is for inputs of other dimensions: use its form {_FORMS[match[1]]}, or add a "
        "channel to pictures (B, H, W) with x.unsqueeze(1)"
    ),
    r"(?i)double.*float|float.*double": (
        "float64 meets float32: convert the inputs, the targets or the model with .float()"
    ),
    r"unsigned char|\bByte\b": "the inputs are bytes: convert them in prepare(), as in "
    "inputs.float() / 255",
    r"Target \S+ is out of bounds|Class values must be|device-side assert": (
        "a label or an index is out of range: number the classes from 0, and give the "
        "model one output for each"
    ),
    r"Using a target size": (
        "give the output and the targets the same shape: squeeze an output of shape (B, 1) with "
        "nn.Flatten(0) or .squeeze(1)"
    ),
    r"Found no NVIDIA driver|not compiled with CUDA": (
        "remove .cuda() and .to('cuda'): Trainbox moves the model and the batches to the device"
    ),
    r"'int' object is not callable": (
        "a TensorDataset has tensors: convert arrays of NumPy with torch.from_numpy(...)"
    ),
    r"Expected more than 1 value per channel": (
        "batch norm needs two examples in each micro-batch: use a larger --batch-size, a lower "
        "--accumulation or --shards, or nn.GroupNorm"
    ),
    # Channels last: each pattern has as many sizes as the inputs of Conv1d, Conv2d or Conv3d.
    r"input\[\d+, \d+, (\d+)\] to have \1 channels": (
        "the channels are the last dimension: write inputs.permute(0, 2, 1)"
    ),
    r"input\[\d+, \d+, \d+, (\d+)\] to have \1 channels": (
        "the channels are the last dimension: write inputs.permute(0, 3, 1, 2)"
    ),
    r"input\[\d+, \d+, \d+, \d+, (\d+)\] to have \1 channels": (
        "the channels are the last dimension: write inputs.permute(0, 4, 1, 2, 3)"
    ),
    r"to have \d+ channels, but got (\d+) channels": (
        "add the channels with inputs.unsqueeze(1) if the inputs have none, or give the first "
        "layer the channels of the inputs"
    ),
    r"cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)"
    r"(?:.* of shape \(([\d, ]+)\))?": _of_matrix,
    r"index out of range in self": (
        "nn.Embedding(N, ...) has the indices 0 to N - 1: number from 0, or raise N"
    ),
    r"scalar types: Long, Int": "indices are whole numbers: convert them with .long()",
    r"backward through the graph a second time": (
        "losses() only returns the losses: remove backward() from it; if it has none, a tensor of "
        "the data or of an earlier step has a gradient: use .detach() where it is kept"
    ),
    r"grad can be implicitly created only for scalar": (
        "losses() only returns the losses: remove backward() from it"
    ),
    r"empty parameter list": (
        "the model has no parameters: keep layers of a list in an nn.ModuleList"
    ),
    r"'(?:dict|tuple|list)' object has no attribute|must be Tensor, not dict"
    r"|'(?:dict|tuple|list)' and 'Tensor'|'Tensor' and '(?:dict|tuple|list)'": (
        "if this is the output of the model, take the tensor out of it"
    ),
    r"'NoneType' object has no attribute|must be Tensor, not NoneType"
    r"|'NoneType' and 'Tensor'|'Tensor' and 'NoneType'": (
        "a value is missing: a forward() or another function may have no return"
    ),
    r"shape '\[([-\d, ]+)\]' is invalid for input of size (\d+)": _of_fixed_batch,
    r"Expected hidden(?:\[\d\])? size \((\d+), \d+, (\d+)\), got \[\1, (\d+), \2\]": (
        _IF_FIXED.format(r"\3") + "; if the first dimension of its input is the batch, add "
        "batch_first=True"
    ),
    r"(has|have|must|should) (to )?be (between|positive|greater|less|non-negative|in )": (
        "correct the value of --set, or the value in the task"
    ),
    r"negative dimension": "a size is below 0: correct the task, or the value of --set",
    r"Expected input batch_size": (
        "the first dimension of the output must be the batch: use batch_first=True for an RNN"
    ),
    r"positional argument.*the model got a (tuple|list)": (
        "a Classification calls model(inputs): unpack the inputs in forward(self, inputs)"
    ),
    r"resize storage|stack expects each tensor to be equal size": (
        "examples have different shapes: pad or crop them in __getitem__, or pad them in collate()"
    ),
    r"(default_collate|the batch of its examples).*NoneType": (
        "an example is or contains None: return tensors or numbers from __getitem__"
    ),
    r"default_collate": "an example cannot be batched: return tensors, arrays, numbers, tuples or "
    "dicts from __getitem__",
    # A name without a folder. numpy.loadtxt raises `x.csv not found`.
    r"(?:build_model\(\)|import) raised FileNotFoundError: (?:.*: ')?([^/':]+)(?:'| not found)": (
        r"write Path(__file__).parent / '\1' for a file beside the task"
    ),
    r"FileNotFoundError: (?:.*: ')?([^/':]+)(?:'| not found)": (
        r"write data_dir / '\1', and set the folder with --data-dir"
    ),
    r"FileNotFoundError|NotADirectoryError": (
        "put the data there, or set its folder with --data-dir"
    ),
    r"Connection\w*Error|RemoteDisconnected|BrokenPipeError": (
        "check that this machine reaches the server that the task connects to"
    ),
    r"Too many open files": "close files that are no longer read, or raise `ulimit -n`",
    r"No space left|quota exceeded": "free some space on the disk of this file",
    r"Read-only file system": "write to a folder that is mounted for writing",
    r"PermissionError": "make it readable for this user",
    r"(losses|statistics|prepare)\(\) raised FrozenInstanceError": (
        "a task is frozen: keep a counter in a buffer of the model, and a factor on the learning "
        "rate in schedule()"
    ),
    r"FrozenInstanceError|cannot assign to field": (
        "a task is frozen: return dataclasses.replace(self, ...) from with_data(), or "
        "compute the value in a method"
    ),
    r"with_(data|classes)\(\).*unexpected keyword argument": (
        "only fields can be replaced: declare a field (class_names: tuple[str, ...] = ()), "
        "not a ClassVar"
    ),
    r"unpack": "the batch has another form: use the form of the collated examples after prepare()",
    r"on the same device": "create tensors on the device of the batch, and register "
    "constants as buffers",
}


def remedy(found: str, called: str = "") -> str:
    """Return how to fix `found`, such as `losses() raised ValueError: bad value`, or "".

    `called` has the functions of libraries below the task's own line, the outermost one first.
    """
    text = f"{found} in {called}"
    matches = ((re.search(sign, text), cure) for sign, cure in _REMEDIES.items())
    return next(
        (cure(match) if callable(cure) else match.expand(cure) for match, cure in matches if match),
        "",
    )
