//! Relay and workers as services of a running systemd, installed by the exact commands of the documentation and of the
//! relay's page.

use std::path::Path;
use std::process::Command;

use modelrelay_harness::cannot_run;
use modelrelay_harness::process::{Process, on_path};
use modelrelay_harness::tls::Certificates;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::machine::Machine;
use crate::replaced;

const SERVICES: &str = "docs/how-to/services.md";

/// The edits that a user makes in the editor, in relay.env first.
const EDIT_RELAY: &str =
    "sed -i -e \"s/^WORKER_SECRET=$/&a-secret-of-workers/; s/^MODELRELAY_ADMIN_TOKEN=$/&a-token-of-admins/\"";
const EDIT_WORKER: &str =
    "sed -i -e \"s/^WORKER_SECRET=$/&a-secret-of-workers/; s|^PROXY_URL=.*|PROXY_URL=http://127.0.0.1:8080|\"";

/// The machine's backends: one that responds at once, one with long responses. Neither finishes anything when it is
/// stopped.
const BACKENDS: &str = "for backend in '8000 demo 0ms' '8001 slow 200ms'; do set -- $backend
  systemd-run --quiet --unit=backend-$2 --property=KillSignal=KILL target/release/modelrelay-worker demo --listen 127.0.0.1:$1 --model $2 --delay $3
done";

/// Returns the block of a page that contains this line.
fn block(page: &str, line: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let blocks = text.split("\n```").skip(1).step_by(2).filter_map(|block| Some(block.split_once('\n')?.1));
    let found: Vec<_> = blocks.filter(|block| block.contains(line)).collect();
    assert_eq!(found.len(), 1, "blocks of {page} with {line:?}");
    found[0].to_owned()
}

/// Boots a machine with a relay installed by `docs/how-to/services.md`, and returns it with the API key created there.
async fn with_relay() -> Option<(Machine, String)> {
    let machine = Machine::boot().await?;
    machine.run(BACKENDS).await;
    let install = block(SERVICES, "enable --now modelrelay-relay");
    machine.run(&replaced(install, &[("sudoedit", EDIT_RELAY.to_owned())])).await;
    // At once: the start has waited for the relay.
    let output = machine.run(&block(SERVICES, "keys create laptop")).await;
    let key =
        output.lines().find(|line| line.starts_with("mr-")).unwrap_or_else(|| panic!("no key: {output}")).to_owned();
    Some((machine, key))
}

/// Starts a stream of the slow model, and waits for its first piece.
async fn begin_stream(machine: &Machine, key: &str) -> Process {
    let stream = machine.spawn_client(&request_command(key, "slow", true));
    stream.wait_for_line("data: {").await;
    assert!(!stream.log().contains("[DONE]"), "the stream has ended already");
    stream
}

/// Checks that the stream, which other events interrupted, arrives completely.
async fn is_whole(mut stream: Process) {
    assert!(stream.wait_exit().await.success(), "{}", stream.log().dump());
    assert!(stream.log().contains("data: [DONE]"), "{}", stream.log().dump());
}

fn request_command(key: &str, model: &str, stream: bool) -> String {
    // A stream lasts some seconds, however slow the machine is.
    let content = if stream { "and so on ".repeat(10) } else { "hello".to_owned() };
    let body = json!({"model": model, "stream": stream, "messages": [{"role": "user", "content": content}]});
    format!(
        "curl --silent --show-error --fail-with-body --no-buffer --max-time 50 --header 'Authorization: Bearer {key}' \
         --json '{body}' http://127.0.0.1:8080/v1/chat/completions"
    )
}

/// Sends a request, which waits until a worker connects, and checks its response.
async fn answers(machine: &Machine, key: &str, model: &str) {
    let output = machine.run(&request_command(key, model, false)).await;
    let answer: Value = serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output}"));
    assert_eq!(answer["model"], model, "{output}");
}

/// Stops a unit while a response runs: both the response and the service end in order.
async fn a_stop_drains(machine: &Machine, key: &str, unit: &str) {
    let stream = begin_stream(machine, key).await;
    let output =
        machine.run(&format!("systemctl stop {unit}\nsystemctl show --property Result,ActiveState {unit}")).await;
    is_whole(stream).await;
    assert_eq!(output, "Result=success\nActiveState=inactive", "{unit}");
}

/// Kills a unit, and checks that it is restarted.
async fn a_killed_one_is_restarted(machine: &Machine, unit: &str) {
    let restarted = format!(
        "systemctl kill --signal KILL {unit}
         until [ \"$(systemctl show --property NRestarts,ActiveState --value {unit})\" = $'1\\nactive' ]; do sleep 0.05; done"
    );
    machine.run(&restarted).await;
}

#[tokio::test]
async fn documented_relay_and_worker_start_drain_and_restart() {
    let Some((machine, key)) = with_relay().await else { return };
    let install = block(SERVICES, "enable --now modelrelay-worker@vllm");
    let edit = replaced(install, &[("sudoedit", format!("{EDIT_WORKER} -e s/:8000/:8001/"))]);
    machine.run(&edit).await;
    answers(&machine, &key, "slow").await;

    let worker = "modelrelay-worker@vllm";
    a_stop_drains(&machine, &key, worker).await;
    machine.run(&format!("systemctl start {worker}")).await;
    answers(&machine, &key, "slow").await;
    a_killed_one_is_restarted(&machine, worker).await;
    answers(&machine, &key, "slow").await;
    a_stop_drains(&machine, &key, "modelrelay-relay").await;
    // With its stored state.
    machine.run("systemctl start modelrelay-relay").await;
    a_killed_one_is_restarted(&machine, "modelrelay-relay").await;
    answers(&machine, &key, "slow").await;
    let kept = machine.run("stat --format %a /var/lib/modelrelay/api-keys.json").await;
    assert_eq!(kept, "600");
    let command = block("charts/modelrelay/RUNBOOKS.md", "journalctl -u modelrelay-relay");
    let output = machine.run(&format!("export MODELRELAY_ADMIN_TOKEN=a-token-of-admins\n{command}")).await;
    assert!(output.contains("worker registered") && output.contains("connected to proxy"), "{output}");

    // As the table documents, for a server that would be stopped at once.
    machine.run(&edit_unit(worker, "[Unit]\nAfter=backend-slow.service")).await;
    let stream = begin_stream(&machine, &key).await;
    machine.run("systemctl poweroff").await;
    is_whole(stream).await;
}

/// Copies the page's scripts to a folder in which any Node loads them as modules.
fn web_modules() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../relay/web");
    for script in std::fs::read_dir(scripts).expect("the pages exist").flatten() {
        if script.path().extension().is_some_and(|extension| extension == "js") {
            std::fs::copy(script.path(), folder.path().join(script.file_name())).expect("a folder that can be written");
        }
    }
    std::fs::write(folder.path().join("package.json"), r#"{"type": "module"}"#).expect("a folder that can be written");
    folder
}

#[tokio::test]
async fn worker_of_setup_page_starts_drains_and_restarts() {
    let Some(node) = on_path("node") else { return cannot_run("node is not installed") };
    let lasting = |backend: &str, secret: &str| {
        let settings = json!({
            "system": "linux", "relay": "http://127.0.0.1:8080", "provider": "local", "secret": secret, "atOnce": 2,
            "backend": {"url": backend, "engine": "openai"}, "name": r#"the 100% "garage" \ $HOME's"#,
        });
        let print = format!(
            "import {{ lasting }} from './commands.js';\nfor (const block of lasting({settings})) console.log(block.text);"
        );
        let modules = web_modules();
        let command =
            Command::new(&node).args(["--input-type=module", "--eval", &print]).current_dir(&modules).output();
        let printed = command.expect("it starts");
        assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
        // In the folder in which the page has users build and stay.
        format!("cd target/release\n{}", String::from_utf8_lossy(&printed.stdout))
    };
    let Some((machine, key)) = with_relay().await else { return };
    let unit = "modelrelay-worker";

    let (succeeded, output) = machine.attempt(&lasting("127.0.0.1:8000", "a-secret-of-workers")).await;
    assert!(!succeeded && output.contains("Job for modelrelay-worker.service failed"), "{output}");
    // Pasted again, with the missing part: http://.
    machine.run(&lasting("http://127.0.0.1:8000", "a-secret-of-workers")).await;
    answers(&machine, &key, "demo").await;
    // And again, for another server: the new setting applies, not the running one.
    machine.run(&lasting("http://127.0.0.1:8001", "a-secret-of-workers")).await;
    answers(&machine, &key, "slow").await;
    let workers = "MODELRELAY_ADMIN_TOKEN=a-token-of-admins modelrelay-relay workers --output json";
    let workers: Value = serde_json::from_str(&machine.run(workers).await).expect("it is JSON");
    assert!(workers.to_string().contains(r#"the 100% \"garage\" \\ $HOME's"#), "{workers}");

    a_stop_drains(&machine, &key, unit).await;
    machine.run(&format!("systemctl start {unit}")).await;
    a_killed_one_is_restarted(&machine, unit).await;
    answers(&machine, &key, "slow").await;
}

#[tokio::test]
async fn worker_with_worker_yaml_lets_its_servers_finish() {
    let Some((machine, key)) = with_relay().await else { return };
    machine
        .run(
            "install -m 755 target/release/modelrelay-worker /usr/local/bin/
             cp deploy/systemd/modelrelay-worker@.service /etc/systemd/system/
             export WORKER_SECRET=a-secret-of-workers
             cd /root && modelrelay-worker connect --yes --backend http://127.0.0.1:8000 http://127.0.0.1:8080",
        )
        .await;
    let typed = block(SERVICES, "LoadCredential=worker.yaml");
    let (of_any_worker, _) =
        typed.split_once("\n# Only where the worker starts servers.").expect("the rest is for such workers");
    let unit = "modelrelay-worker@gpu";
    let edited = edit_block("sudo systemctl edit modelrelay-worker@gpu", unit, of_any_worker);
    machine.run(&format!("cd /root\n{edited}")).await;
    // The journal shows a line some time after the program wrote it.
    let follow = "journalctl -u modelrelay-worker@gpu -f";
    let until_said = "until journalctl -u modelrelay-worker@gpu | grep 'probe server listening'; do sleep 0.05; done";
    machine.run(&replaced(block(SERVICES, follow), &[(follow, until_said.to_owned())])).await;
    answers(&machine, &key, "demo").await;

    // A server that, like most, ends at once on SIGTERM, whatever runs.
    let server = "modelrelay-worker demo --listen 127.0.0.1:${PORT} --model slow --delay 200ms & trap \"kill -KILL $!\" TERM; wait";
    let file = json!({"relay": "http://127.0.0.1:8080", "multiplexer": {"slots": [
        {"id": "gpu0", "driver": "process", "models": [{"id": "slow", "command": ["bash", "-c", server]}]}
    ]}});
    let all = edit_unit(unit, &replaced(typed, &[("YOU", "you".to_owned())]));
    machine
        .run(&format!(
            "useradd --create-home you\ncat > /etc/modelrelay/worker.yaml <<'END'\n{file}\nEND\n{all}\nsystemctl restart {unit}"
        ))
        .await;
    answers(&machine, &key, "slow").await;
    a_stop_drains(&machine, &key, unit).await;
}

#[tokio::test]
async fn relay_uses_documented_file_locations() {
    let Some((machine, _)) = with_relay().await else { return };
    let certificates = Certificates::make();
    let unit = "modelrelay-relay";
    let edited = edit_block("sudo groupadd --system modelrelay", unit, &block(SERVICES, "SupplementaryGroups="));
    let (certificate, private_key) = (certificates.certificate(), certificates.key());
    machine
        .run(&format!(
            "cd /root
cat > tls.crt <<'END'
{certificate}
END
cat > tls.key <<'END'
{private_key}
END
{edited}
cat >> /etc/modelrelay/relay.env <<'END'
TLS_CERT_FILE=/etc/modelrelay/tls.crt
TLS_KEY_FILE=/etc/modelrelay/tls.key
AUDIT_LOG_FILE=/var/lib/modelrelay/audit.log
END
systemctl restart {unit}
curl --silent --fail --cacert tls.crt https://localhost:8080/health
test -f /var/lib/modelrelay/audit.log"
        ))
        .await;
}

/// Returns the block of the documentation that edits a unit, with this text typed in.
fn edit_block(line: &str, unit: &str, typed: &str) -> String {
    replaced(block(SERVICES, line), &[(&format!("sudo systemctl edit {unit}"), edit_unit(unit, typed))])
}

/// Does what `systemctl edit` does, which needs a terminal: writes the file and reloads systemd.
fn edit_unit(unit: &str, typed: &str) -> String {
    let folder = format!("/etc/systemd/system/{unit}.service.d");
    format!("mkdir -p {folder}\ncat > {folder}/override.conf <<'END'\n{typed}\nEND\nsystemctl daemon-reload")
}
