"""What does saving and loading the optimizer's state cost: time, how long training stalls, memory?

    pip install -e '.[torch]' rich
    python -m benchmarks.checkpoints --model gpt2 --out checkpoints.jsonl --markdown checkpoints.md

Run it from the root of the repository. ``variants`` says what is compared, ``systems`` with which optimizers and
which state, ``meter`` what is measured of a call, ``worker`` what one launch does, ``report`` what is made of the
numbers. State is saved at two ranks and loaded at three, in processes of their own, and compared with what it was.
Files go to a temporary folder below ``--folder``, which should be on the disk in question; they are removed at the end.
"""
