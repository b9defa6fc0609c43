// The systems that a worker runs on, and the servers that it runs next to.

export const SYSTEMS = [
  { id: 'linux', name: 'Linux', icon: 'linux', detail: 'PC, server, WSL' },
  { id: 'macos', name: 'macOS', icon: 'macos', detail: 'Apple silicon' },
  { id: 'windows', name: 'Windows', icon: 'windows', detail: '10, 11, Server' },
  { id: 'container', name: 'Container', icon: 'container', detail: 'Docker, Podman' },
  { id: 'kubernetes', name: 'Kubernetes', icon: 'kubernetes', detail: 'a Pod' },
];

/** `engine` is the value of BACKEND_ENGINE, `atOnce` the server's usual concurrency, and `flag` the flag that sets it. */
export const BACKENDS = [
  { id: 'vllm', name: 'vLLM', port: 8000, engine: 'vllm', atOnce: 16, begin: 'vllm serve Qwen/Qwen3-8B', flag: '--max-num-seqs' },
  { id: 'llama-server', name: 'llama-server', port: 8080, engine: 'llama-server', atOnce: 4, begin: 'llama-server -hf ggml-org/Qwen3-8B-GGUF --parallel 4', flag: '--parallel' },
  { id: 'ollama', name: 'Ollama', port: 11434, engine: 'ollama', atOnce: 4, begin: 'ollama run qwen3', flag: 'OLLAMA_NUM_PARALLEL' },
  { id: 'sglang', name: 'SGLang', port: 30000, engine: 'sglang', atOnce: 16, begin: 'python -m sglang.launch_server --model-path Qwen/Qwen3-8B', flag: '--max-running-requests' },
  { id: 'lm-studio', name: 'LM Studio', port: 1234, engine: 'openai', atOnce: 4, begin: 'lms server start', flag: 'its setting for concurrent predictions' },
  { id: 'other', name: 'Other', port: 8000, engine: 'openai', atOnce: 4, begin: null, flag: 'the limit of your server' },
];

/** The browser's own system is the best guess at the other machine's. */
export function likelySystem() {
  const platform = `${navigator.userAgentData?.platform ?? ''} ${navigator.platform ?? ''}`.toLowerCase();
  if (platform.includes('mac')) return 'macos';
  return platform.includes('win') ? 'windows' : 'linux';
}

/** True for addresses that mean "this machine" everywhere, so that another machine would dial itself. */
export function isLoopback(address) {
  try {
    const { hostname } = new URL(address);
    return hostname === 'localhost' || hostname === '[::1]' || hostname.startsWith('127.') || hostname === '0.0.0.0';
  } catch {
    return false;
  }
}
