"""The parts of ``train_gpt.py`` that have nothing to do with sharding: model, text, options, launch, output."""
