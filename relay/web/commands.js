// The commands to paste on the other machine. Pure functions from settings to text. The variables are those of `modelrelay-worker --help`.

import { BACKENDS } from './machines.js';
import { inHereDocument, powershell, quoted, shell, systemd, xml } from './quoting.js';

const PORTS = [...new Set(BACKENDS.map((backend) => backend.port))];

/** Returns a command that shows which server responds on which port, with its models. */
export function lookAround(system) {
  if (system === 'windows') {
    return `${PORTS.join(',')} | % { $p = $_; try { "port $p  " + ((irm http://127.0.0.1:$p/v1/models -TimeoutSec 2).data.id -join ', ') } catch {} }`;
  }
  return `for p in ${PORTS.join(' ')}; do curl -sm 2 http://127.0.0.1:$p/v1/models | grep -o '"id": *"[^"]*"' | sed "s/^/port $p  /"; done`;
}

/**
 * `settings`: {system, relay, provider, secret, backend: {url, engine}, atOnce, name}. Settings equal to the worker's defaults are left
 * out.
 */
function variables(settings) {
  return [
    ['PROXY_URL', settings.relay],
    settings.provider !== 'local' && ['PROVIDER_NAME', settings.provider],
    ['WORKER_SECRET', settings.secret],
    ['BACKEND_URL', settings.backend.url],
    settings.backend.engine !== 'openai' && ['BACKEND_ENGINE', settings.backend.engine],
    ['MAX_CONCURRENCY', String(settings.atOnce)],
    settings.name && ['WORKER_NAME', settings.name],
  ].filter(Boolean);
}

const withoutSecret = (settings) => variables(settings).filter(([name]) => name !== 'WORKER_SECRET');

/** The steps to install the program: [{title, text}]. It is a single file. */
export function bringing(system) {
  if (system === 'container' || system === 'kubernetes') {
    return [{ title: 'Build the image in the project folder', text: 'make images\ndocker build -f deploy/docker/Dockerfile.worker -t modelrelay-worker target/images/bin' }];
  }
  if (system === 'windows') return [forWindows()];
  const build = { title: 'Build it in the project folder', text: 'cargo build --release --locked -p modelrelay-worker\ncd target/release', note: 'The program is one file: you can also copy target/release/modelrelay-worker from a machine with the same system.' };
  return [build];
}

// Like scripts/windows, which is tested.
function forWindows() {
  return {
    title: 'Build it on Linux or in WSL, in the project folder',
    text: 'sudo apt-get install gcc-mingw-w64-x86-64\nrustup target add x86_64-pc-windows-gnu\ncargo build --release --locked --target x86_64-pc-windows-gnu -p modelrelay-worker',
    note: 'The program is one file: copy target/x86_64-pc-windows-gnu/release/modelrelay-worker.exe to the Windows machine and open a PowerShell in its folder.',
  };
}

/** The steps to start the worker: [{title, text}]. */
export function starting(settings) {
  if (settings.system === 'container') return [{ title: 'Start the worker', text: dockerRun(settings) }];
  if (settings.system === 'kubernetes') return [{ title: 'Start the worker', text: deployment(settings) }];
  if (settings.system === 'windows') return [{ title: 'Start the worker', text: inPowerShell(variables(settings)) }];
  return [{ title: 'Start the worker', text: inShell(variables(settings)) }];
}

/** The shortest way to start the worker: the program prompts for the rest. A container has no terminal for prompts. */
export function connecting(settings) {
  if (settings.system === 'container' || settings.system === 'kubernetes') return [];
  const known = ['PROVIDER_NAME', 'WORKER_SECRET', 'WORKER_NAME', settings.url && 'BACKEND_URL'];
  const words = variables(settings).filter(([name]) => known.includes(name));
  const text = settings.system === 'windows'
    ? inPowerShell(words, `connect ${powershell(settings.relay)} --run`)
    : inShell(words, `connect ${shell(settings.relay)} --run`);
  return [{
    title: 'Start the worker interactively',
    text,
    note: 'The shortest way: it probes for the server, prompts for the rest and saves the settings in worker.yaml. The command below does the same with all settings given.',
  }];
}

function inShell(environment, args = '') {
  const words = environment.map(([name, value]) => `${name}=${shell(value)}`);
  return `${words.join(' \\\n')} \\\n./modelrelay-worker ${args}`.trim();
}

function inPowerShell(environment, args = '') {
  const words = environment.map(([name, value]) => `$env:${name} = ${powershell(value)}`);
  return `${words.join('\n')}\n.\\modelrelay-worker.exe ${args}`.trim();
}

// Uses the host's network: a server that listens on 127.0.0.1 can only be reached from there.
function dockerRun(settings) {
  const words = variables(settings).map(([name, value]) => `  -e ${name}=${shell(value)}`);
  return `docker run --rm --network host \\\n${words.join(' \\\n')} \\\n  modelrelay-worker`;
}

function deployment(settings) {
  const app = 'modelrelay-worker';
  // From a separate Pod, the server is reached through its Service, not at 127.0.0.1.
  const env = withoutSecret({ ...settings, backend: { ...settings.backend, url: inCluster(settings.backend.url) } });
  return `kubectl apply -f - <<'END'
apiVersion: v1
kind: Secret
metadata: {name: ${app}}
stringData:
  worker-secret: ${quoted(settings.secret)}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: ${app}}
spec:
  selector: {matchLabels: {app: ${app}}}
  template:
    metadata: {labels: {app: ${app}}}
    spec:
      containers:
        - name: worker
          image: registry.example/modelrelay-worker   # where you pushed it
          env:
${env.map(([key, value]) => `            - {name: ${key}, value: ${quoted(value)}}`).join('\n')}
            - name: WORKER_SECRET
              valueFrom: {secretKeyRef: {name: ${app}, key: worker-secret}}
END`;
}

function inCluster(url) {
  return url.replace(/\/\/(127\.0\.0\.1|localhost)(?=[:/]|$)/, '//inference-server');
}

/** The steps that make the worker survive a restart of the machine: [{title, text, note?}]. */
export function lasting(settings) {
  switch (settings.system) {
    case 'macos':
      return [{ title: 'Store the secret in a file', text: `(umask 077; printf %s ${shell(settings.secret)} > "$HOME/.modelrelay-secret")` }, { title: 'Start it at login', text: launchd(settings) }];
    case 'container':
      return [{ title: 'compose.yaml', text: compose(settings) }, { title: 'Start it now and after each restart', text: 'docker compose up -d' }];
    case 'kubernetes':
      return [{ title: 'With the operator', text: workerPool(settings), note: 'The Deployment above survives restarts. If the operator runs this relay, a WorkerPool can run a worker next to each of your inference Pods instead.' }];
    case 'windows':
      return [{ title: 'Windows service, in an administrator PowerShell', text: windowsService(settings), note: 'Change to the folder of modelrelay-worker.exe first. Stop-Service ModelRelayWorker waits for running requests. The log is C:\\ProgramData\\ModelRelay\\worker.log.' }];
    default:
      return [intoPlace(settings), { title: 'systemd service', text: unit(settings) }];
  }
}

function intoPlace({ secret }) {
  return {
    title: 'Install program and secret',
    text: `sudo install -m 755 modelrelay-worker /usr/local/bin/\nsudo install -d -m 755 /etc/modelrelay\nprintf %s ${shell(secret)} | sudo install -m 600 /dev/stdin /etc/modelrelay/worker-secret`,
  };
}

// systemd passes the secret as a credential, so that no other user of the machine can read it and the service needs no user of its own. The
// credential's path is spelled out, because the %d for it is newer than Ubuntu 22.04's systemd. `restart` rather than `start`, so that
// pasting the commands again applies changes. Of the servers, only Ollama installs a unit; After= also orders the shutdown of the machine.
function unit(settings) {
  return `sudo tee /etc/systemd/system/modelrelay-worker.service > /dev/null <<'END'
[Unit]
Description=ModelRelay worker
Wants=network-online.target
After=network-online.target${settings.backend.engine === 'ollama' ? ' ollama.service' : ''}

[Service]
Type=notify
${withoutSecret(settings).map(([name, value]) => `Environment=${systemd(`${name}=${value}`)}`).join('\n')}
Environment=WORKER_SECRET_FILE=/run/credentials/%n/worker-secret
LoadCredential=worker-secret:/etc/modelrelay/worker-secret
ExecStart=/usr/local/bin/modelrelay-worker
DynamicUser=yes
Restart=always
RestartSec=2
TimeoutStopSec=45

[Install]
WantedBy=multi-user.target
END
sudo systemctl daemon-reload
sudo systemctl enable modelrelay-worker
sudo systemctl restart modelrelay-worker`;
}

// Only administrators and the system may access the folder, because it contains the secret and the program that the service runs. Any user
// may have created the folder before, with other permissions: it is taken over, its access list is reset, and access is restricted. In
// between it has the permissions of its parent, so an older secret is deleted first. Groups are named by SID, because their names are
// translated. Pasting the commands again must apply changes: an existing service is removed once it has drained, by the new program.
function windowsService(settings) {
  const { relay, provider, backend, atOnce, name, secret } = settings;
  return `$folder = "$env:ProgramData\\ModelRelay"
if (Get-Service ModelRelayWorker -ErrorAction SilentlyContinue) { .\\modelrelay-worker.exe service uninstall }
New-Item -ItemType Directory -Force $folder | Out-Null
icacls $folder /setowner '*S-1-5-32-544' /T | Out-Null
Remove-Item -Force -ErrorAction SilentlyContinue "$folder\\worker.secret"
icacls $folder /reset /T | Out-Null
icacls $folder /inheritance:r /grant '*S-1-5-32-544:(OI)(CI)F' '*S-1-5-18:(OI)(CI)F' | Out-Null
Copy-Item modelrelay-worker.exe $folder
Set-Content -Encoding ascii "$folder\\worker.secret" ${powershell(secret)}
Set-Content -Encoding utf8 "$folder\\worker.yaml" @'
relay: ${quoted(relay)}
provider: ${quoted(provider)}
workerSecretFile: worker.secret
${name ? `name: ${quoted(name)}\n` : ''}backend:
  url: ${quoted(backend.url)}
  engine: ${backend.engine}
maxConcurrency: ${atOnce}
'@
& "$folder\\modelrelay-worker.exe" service install --config "$folder\\worker.yaml"
Start-Service ModelRelayWorker`;
}

function launchd(settings) {
  const entries = withoutSecret(settings).map(([name, value]) => `    <key>${name}</key><string>${inHereDocument(xml(value))}</string>`);
  return `sudo install -m 755 modelrelay-worker /usr/local/bin/
mkdir -p ~/Library/LaunchAgents
cat > ~/Library/LaunchAgents/io.modelrelay.worker.plist <<END
<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0"><dict>
  <key>Label</key><string>io.modelrelay.worker</string>
  <key>ProgramArguments</key><array><string>/usr/local/bin/modelrelay-worker</string></array>
  <key>EnvironmentVariables</key><dict>
${entries.join('\n')}
    <key>WORKER_SECRET_FILE</key><string>$HOME/.modelrelay-secret</string>
  </dict>
  <key>RunAtLoad</key><true/>
  <key>KeepAlive</key><true/>
  <key>ExitTimeOut</key><integer>45</integer>
  <key>StandardErrorPath</key><string>$HOME/Library/Logs/modelrelay-worker.log</string>
</dict></plist>
END
launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/io.modelrelay.worker.plist`;
}

function compose(settings) {
  // In Compose a single $ begins a variable.
  const value = (text) => quoted(text).replaceAll('$', '$$$$');
  return `services:
  modelrelay-worker:
    image: modelrelay-worker
    network_mode: host
    restart: unless-stopped
    stop_grace_period: 45s
    environment:
${variables(settings).map(([name, text]) => `      ${name}: ${value(text)}`).join('\n')}`;
}

function workerPool({ provider, backend, atOnce }) {
  return `kubectl apply -f - <<'END'
apiVersion: modelrelay.io/v1alpha1
kind: WorkerPool
metadata: {name: ${backend.engine}}
spec:
  provider: ${quoted(provider)}
  backend: {engine: ${backend.engine}}
  maxConcurrency: ${atOnce}
END
kubectl patch deployment YOUR-SERVER --type merge \\
  -p '{"spec":{"template":{"metadata":{"labels":{"modelrelay.io/pool":"${backend.engine}"}}}}}'`;
}
