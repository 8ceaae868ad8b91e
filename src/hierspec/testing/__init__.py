"""For tests, ours and those of people who build on hierspec: fakes and tiny random checkpoints.

The fakes need numpy alone; the checkpoints need torch.
"""
