// A relay and its workers: the real programs, on free ports, in a temporary folder, killed at the end.

import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';

import { HandWorker } from './hand-worker.js';

export const TOKEN = 'browser-admin';
export const SECRET = 'browser-secret-$pecial';
const PROMPT = 'a prompt that no log may have';
const PATIENCE_MS = 20_000;

export class Site {
  /** `relay` are variables of the relay, `config` is a relay.yaml, `files` are further files by name. */
  static async start(relay = {}, config = null, files = {}) {
    const site = new Site();
    site.folder = mkdtempSync(path.join(tmpdir(), 'modelrelay-browser-'));
    site.programs = [];
    site.played = [];
    site.chats = [];
    /** Texts that no program may ever log. */
    site.secrets = [TOKEN, SECRET, PROMPT];
    site.relayEnv = { WORKER_SECRET: SECRET, MODELRELAY_ADMIN_TOKEN: TOKEN, ...relay };
    if (config) {
      writeFileSync(path.join(site.folder, 'relay.yaml'), config);
      site.relayEnv.MODELRELAY_CONFIG = 'relay.yaml';
    }
    for (const [name, text] of Object.entries(files)) writeFileSync(path.join(site.folder, name), text);
    await site.startRelay('127.0.0.1:0');
    return site;
  }

  async startRelay(listen) {
    this.relay = this.#spawn('relay', [], { LISTEN_ADDR: listen, ...this.relayEnv });
    const listener = (name) => this.relay.logged(new RegExp(` ${name}listening on (http://127\\.0\\.0\\.1:\\d+)`));
    this.url = await listener('');
    /** The addresses for workers, and of the pages. */
    this.workers = this.relayEnv.WORKER_LISTEN_ADDR ? await listener('worker ') : this.url;
    this.pages = this.relayEnv.ADMIN_LISTEN_ADDR ? await listener('admin ') : this.url;
  }

  /** Returns the address of a demo backend. */
  async backend(model) {
    const demo = this.#spawn('worker', ['demo', '--listen', '127.0.0.1:0', '--model', model], {});
    return `http://${await demo.logged(/address=(127\.0\.0\.1:\d+)/)}`;
  }

  /** Starts a demo backend with a worker. */
  async worker(name, model = 'demo', env = {}) {
    return this.bareWorker(name, { BACKEND_URL: await this.backend(model), MAX_CONCURRENCY: '4', ...env });
  }

  bareWorker(name, env) {
    return this.#spawn('worker', [], { PROXY_URL: this.workers, WORKER_SECRET: SECRET, WORKER_NAME: name, PROBE_ADDR: '127.0.0.1:0', ...env });
  }

  /** Runs a command line that was copied from a page and starts a worker, in the site's folder. */
  line(text) {
    const command = text.replace('./modelrelay-worker', `exec ${binary('worker')}`);
    return this.#run('sh', ['-c', command], { PROBE_ADDR: '127.0.0.1:0' });
  }

  /** Starts a worker with one slot for two models, each of which is a separate process. */
  swappingWorker(name, models) {
    const program = binary('worker');
    const entries = models.map((id) => `    - {id: ${id}, command: ["${program}", demo, --listen, "127.0.0.1:\${PORT}", --model, ${id}], maxConcurrency: 4}`);
    const file = path.join(this.folder, `${name}.yaml`);
    writeFileSync(file, `multiplexer:\n  slots:\n  - id: gpu0\n    driver: process\n    models:\n${entries.join('\n')}\n`);
    return this.bareWorker(name, { WORKER_CONFIG: file });
  }

  /**
   * Connects this number of workers that the test simulates: they accept requests, and do not respond before they are made to.
   */
  async hands(count, registration) {
    const made = [];
    const dial = (number) => HandWorker.dial(this.workers, SECRET, registration(number));
    for (let from = 0; from < count; from += 100) {
      const some = Array.from({ length: Math.min(100, count - from) }, (_, i) => dial(from + i));
      made.push(...(await Promise.all(some)));
    }
    this.played.push(...made);
    return made;
  }

  async admin(method, route, body) {
    const headers = { authorization: `Bearer ${TOKEN}`, 'content-type': 'application/json' };
    const response = await fetch(this.pages + route, { method, headers, body: body && JSON.stringify(body) });
    const answer = response.status === 204 ? null : await response.json();
    if (answer?.secret) this.secrets.push(answer.secret);
    return answer;
  }

  /** Sends a chat request whose response is not read yet; `end` aborts it. */
  chat(model, more = {}) {
    const stop = new AbortController();
    const answer = fetch(`${this.url}/v1/chat/completions`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ model, messages: [{ role: 'user', content: PROMPT }], ...more }),
      signal: stop.signal,
    });
    // Aborted at the end of the test.
    answer.catch(() => {});
    this.chats.push(stop);
    return answer;
  }

  async close() {
    this.chats.forEach((stop) => stop.abort());
    this.played.forEach((hand) => hand.close());
    this.programs.forEach((program) => program.kill());
    await Promise.all(this.programs.map((program) => program.ended));
    rmSync(this.folder, { recursive: true, force: true });
    for (const { log } of this.programs) {
      const disclosed = this.secrets.find((secret) => log.includes(secret));
      if (disclosed) throw new Error(`a program's log has the secret ${disclosed}:\n${log}`);
    }
  }

  #spawn(name, args, env) {
    return this.#run(binary(name), args, env);
  }

  #run(file, args, env) {
    const program = new Program(file, args, env, this.folder);
    this.programs.push(program);
    return program;
  }
}

function binary(name) {
  return path.join(process.env.MODELRELAY_BIN_DIR, `modelrelay-${name}`);
}

class Program {
  constructor(file, args, env, cwd) {
    this.log = '';
    this.waiting = new Set();
    this.child = spawn(file, args, { env: { PATH: process.env.PATH, ...env }, cwd, stdio: ['ignore', 'pipe', 'pipe'] });
    for (const stream of [this.child.stdout, this.child.stderr]) stream.on('data', (data) => this.#onOutput(String(data)));
    this.ended = new Promise((resolve) => this.child.on('close', resolve));
  }

  /** Resolves to the first group of `pattern` in the program's past or future output. */
  logged(pattern) {
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => reject(new Error(`no output that matches ${pattern}:\n${this.log.slice(-4000)}`)), PATIENCE_MS);
      const check = () => {
        const found = this.log.match(pattern);
        if (!found) return;
        clearTimeout(late);
        this.waiting.delete(check);
        resolve(found[1] ?? found[0]);
      };
      this.waiting.add(check);
      check();
    });
  }

  kill() {
    this.child.kill('SIGKILL');
  }

  #onOutput(text) {
    this.log += text;
    this.waiting.forEach((check) => check());
  }
}
