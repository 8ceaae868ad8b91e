"""llama.cpp's own HTTP server, as the wheel of xllamacpp has it: python llama_server.py PORT MODEL SLOTS THREADS.

Each slot is a text that is written; all slots share forward passes. It runs until it is told to stop.
"""

import signal
import sys

import xllamacpp

_CONTEXT = 1024  # tokens per slot
port, model, slots, threads = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
parameters = xllamacpp.CommonParams()
parameters.model.path = model
parameters.port, parameters.n_parallel, parameters.n_ctx = port, slots, _CONTEXT * slots
parameters.verbosity = 0
for pool in (parameters.cpuparams, parameters.cpuparams_batch):
    pool.n_threads = threads
    pool.poll = 0  # idle threads sleep, because others are measured meanwhile
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
signal.pause()
