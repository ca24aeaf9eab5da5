"""What does one training step cost beside the peers: time, bytes on the wire, memory?

    pip install -e '.[torch,bench]'
    python -m benchmarks.train_step --model gpt2 --ranks 2 --out gpt2.jsonl --markdown gpt2.md

Run it from the root of the repository. ``variants`` says what is compared, ``models`` on what, ``worker``
what one measurement is, ``launch`` how it is run in fresh processes and when it is repeated, ``report`` what
is made of the numbers. DeepSpeed, which is among ``bench``, has to be built where torch is installed: if pip
fails on it, ``pip install --no-build-isolation deepspeed``. Peers that are not installed are left out.
"""
