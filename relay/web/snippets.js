// The configuration of each client. Pure functions from address, key and model to text; all three are quoted for the target language.

import { isLoopback } from './machines.js';
import { quoted, shell } from './quoting.js';

const HELLO = 'Say hello';

/** [{id, name, group, make({base, key, model}) → [{title, text}], note?}] */
export const CLIENTS = [
  { id: 'curl', name: 'curl', group: 'Command line', make: curl },
  { id: 'openai-python', name: 'OpenAI · Python', group: 'SDKs', make: openaiPython },
  { id: 'openai-ts', name: 'OpenAI · TypeScript', group: 'SDKs', make: openaiTypeScript },
  { id: 'anthropic-python', name: 'Anthropic · Python', group: 'SDKs', make: anthropicPython },
  { id: 'anthropic-ts', name: 'Anthropic · TypeScript', group: 'SDKs', make: anthropicTypeScript },
  { id: 'langchain', name: 'LangChain', group: 'SDKs', make: langchain },
  { id: 'litellm', name: 'LiteLLM', group: 'SDKs', make: litellm },
  { id: 'open-webui', name: 'Open WebUI', group: 'Chat', make: openWebui },
  { id: 'claude-code', name: 'Claude Code', group: 'Coding', make: claudeCode, note: 'The model must support tool calls and a long context: the first request alone has about 12,000 tokens. The attribution line is disabled here because it differs from request to request and would defeat the server’s prompt cache.' },
  { id: 'codex', name: 'Codex', group: 'Coding', make: codex, note: 'Codex uses the Responses API only, so the server behind the worker must support it (vLLM, llama-server and Ollama do).' },
  { id: 'opencode', name: 'opencode', group: 'Coding', make: opencode },
  { id: 'continue', name: 'Continue', group: 'Coding', make: continueDev },
];

function curl({ base, key, model }) {
  const body = (extra) => JSON.stringify({ model, ...extra, stream: true, messages: [{ role: 'user', content: HELLO }] });
  return [
    {
      title: 'OpenAI API',
      text: `curl -N ${shell(`${base}/v1/chat/completions`)} \\\n  -H ${shell(`authorization: Bearer ${key}`)} -H 'content-type: application/json' \\\n  -d ${shell(body({}))}`,
    },
    {
      title: 'Anthropic API',
      text: `curl -N ${shell(`${base}/v1/messages`)} \\\n  -H ${shell(`x-api-key: ${key}`)} -H 'anthropic-version: 2023-06-01' -H 'content-type: application/json' \\\n  -d ${shell(body({ max_tokens: 200 }))}`,
    },
  ];
}

function openaiPython({ base, key, model }) {
  return [
    { title: 'Install', text: 'pip install openai' },
    {
      title: 'Python',
      text: `from openai import OpenAI

client = OpenAI(base_url=${quoted(`${base}/v1`)}, api_key=${quoted(key)})
for chunk in client.chat.completions.create(
    model=${quoted(model)}, stream=True, messages=[{"role": "user", "content": "${HELLO}"}]
):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`,
    },
  ];
}

function openaiTypeScript({ base, key, model }) {
  return [
    { title: 'Install', text: 'npm install openai' },
    {
      title: 'TypeScript',
      text: `import OpenAI from 'openai';

const client = new OpenAI({ baseURL: ${quoted(`${base}/v1`)}, apiKey: ${quoted(key)} });
const stream = await client.chat.completions.create({
  model: ${quoted(model)},
  stream: true,
  messages: [{ role: 'user', content: '${HELLO}' }],
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? '');`,
    },
  ];
}

function anthropicPython({ base, key, model }) {
  return [
    { title: 'Install', text: 'pip install anthropic' },
    {
      title: 'Python',
      text: `from anthropic import Anthropic

client = Anthropic(base_url=${quoted(base)}, api_key=${quoted(key)})
with client.messages.stream(
    model=${quoted(model)}, max_tokens=200, messages=[{"role": "user", "content": "${HELLO}"}]
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)`,
    },
  ];
}

function anthropicTypeScript({ base, key, model }) {
  return [
    { title: 'Install', text: 'npm install @anthropic-ai/sdk' },
    {
      title: 'TypeScript',
      text: `import Anthropic from '@anthropic-ai/sdk';

const client = new Anthropic({ baseURL: ${quoted(base)}, apiKey: ${quoted(key)} });
const stream = client.messages.stream({
  model: ${quoted(model)},
  max_tokens: 200,
  messages: [{ role: 'user', content: '${HELLO}' }],
});
stream.on('text', (text) => process.stdout.write(text));
await stream.finalMessage();`,
    },
  ];
}

function langchain({ base, key, model }) {
  return [
    { title: 'Install', text: 'pip install langchain-openai' },
    {
      title: 'Python',
      text: `from langchain_openai import ChatOpenAI

llm = ChatOpenAI(base_url=${quoted(`${base}/v1`)}, api_key=${quoted(key)}, model=${quoted(model)}, stream_usage=True)
for chunk in llm.stream("${HELLO}"):
    print(chunk.content, end="", flush=True)`,
    },
  ];
}

function litellm({ base, key, model }) {
  const name = quoted(`openai/${model}`);
  return [
    {
      title: 'Python',
      text: `import litellm

for chunk in litellm.completion(
    model=${name}, api_base=${quoted(`${base}/v1`)}, api_key=${quoted(key)},
    stream=True, messages=[{"role": "user", "content": "${HELLO}"}],
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)`,
    },
    {
      title: 'config.yaml of the LiteLLM proxy',
      text: `model_list:
  - model_name: ${quoted(model)}
    litellm_params:
      model: ${name}
      api_base: ${quoted(`${base}/v1`)}
      api_key: ${quoted(key)}`,
    },
  ];
}

function openWebui({ base, key }) {
  // Inside a container 127.0.0.1 is the container.
  const local = isLoopback(base);
  const address = local ? base.replace(/\/\/[^:/]+/, '//host.docker.internal') : base;
  return [
    {
      title: 'Docker',
      text: `docker run -d -p 3000:8080 --name open-webui -v open-webui:/app/backend/data \\
${local ? '  --add-host host.docker.internal:host-gateway \\\n' : ''}  -e OPENAI_API_BASE_URL=${shell(`${address}/v1`)} \\
  -e OPENAI_API_KEY=${shell(key)} \\
  -e ENABLE_OLLAMA_API=false \\
  ghcr.io/open-webui/open-webui:main`,
    },
    { title: 'Or in a running instance: Admin Panel, Settings, Connections, OpenAI API', text: `${base}/v1` },
  ];
}

function claudeCode({ base, key, model }) {
  return [{
    title: 'Shell',
    text: `ANTHROPIC_BASE_URL=${shell(base)} \\
ANTHROPIC_AUTH_TOKEN=${shell(key)} \\
ANTHROPIC_MODEL=${shell(model)} \\
ANTHROPIC_DEFAULT_HAIKU_MODEL=${shell(model)} \\
CLAUDE_CODE_ATTRIBUTION_HEADER=0 \\
claude`,
  }];
}

function codex({ base, key, model }) {
  return [
    {
      title: '~/.codex/config.toml',
      text: `model = ${quoted(model)}
model_provider = "modelrelay"

[model_providers.modelrelay]
name = "ModelRelay"
base_url = ${quoted(`${base}/v1`)}
env_key = "MODELRELAY_API_KEY"
wire_api = "responses"`,
    },
    { title: 'Shell', text: `MODELRELAY_API_KEY=${shell(key)} codex` },
  ];
}

function opencode({ base, key, model }) {
  const config = {
    $schema: 'https://opencode.ai/config.json',
    model: `modelrelay/${model}`,
    provider: {
      modelrelay: {
        npm: '@ai-sdk/openai-compatible',
        name: 'ModelRelay',
        options: { baseURL: `${base}/v1`, apiKey: key },
        models: { [model]: { name: model } },
      },
    },
  };
  return [{ title: 'opencode.json', text: JSON.stringify(config, null, 2) }];
}

function continueDev({ base, key, model }) {
  return [{
    title: '~/.continue/config.yaml',
    text: `name: ModelRelay
version: 0.0.1
schema: v1
models:
  - name: ${quoted(model)}
    provider: openai
    model: ${quoted(model)}
    apiBase: ${quoted(`${base}/v1`)}
    apiKey: ${quoted(key)}
    roles: [chat, edit, apply]`,
  }];
}
