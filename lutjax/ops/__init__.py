"""The ops: a file each, with what it computes and what it accepts. `apply` makes an op of a call, also of one of yours."""

from lutjax.dispatch._transforms import apply as apply
