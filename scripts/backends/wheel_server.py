"""llama.cpp's server from PyPI's xllamacpp, with those of llama-server's options that the tests and the documentation use."""

import argparse
import signal
import sys

from xllamacpp import CommonParams, Server


def options():
    parser = argparse.ArgumentParser(prog="llama-server", description=__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--alias")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-c", "--ctx-size", type=int, default=0)
    parser.add_argument("-ngl", "--n-gpu-layers", type=int, default=0)
    parser.add_argument("-t", "--threads", type=int, default=-1)
    parser.add_argument("-tb", "--threads-batch", type=int, default=-1)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--no-warmup", dest="warmup", action="store_false")
    return parser.parse_args()


def main():
    chosen, params = options(), CommonParams()
    params.model.path = chosen.model
    params.model_alias = {chosen.alias} if chosen.alias else set()
    params.hostnames, params.port = [chosen.host], chosen.port
    params.n_parallel, params.n_ctx, params.n_gpu_layers = chosen.parallel, chosen.ctx_size, chosen.n_gpu_layers
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = chosen.threads, chosen.threads_batch
    params.endpoint_metrics, params.warmup = chosen.metrics, chosen.warmup
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Serves from threads of its own, for as long as it is referenced.
    server = Server(params)
    while server.listening_address:
        signal.pause()


if __name__ == "__main__":
    main()
