//! A network, mounts and a hosts file for one test. The test's binary runs again inside new namespaces, which end with
//! it: nothing is left to clean up.

use std::{
    future::Future,
    path::{Path, PathBuf},
    process::Output,
};

use tokio::process::Command;

use crate::cannot_run;

/// Set inside the namespaces: the folder of their `hosts` file.
const INSIDE: &str = "MODELRELAY_TEST_NAMESPACE";

/// The address of the DNS resolver. If a test listens on it, the resolver never responds; otherwise it does not exist.
pub const RESOLVER: &str = "127.0.0.53";

/// Enables the loopback device, mounts the files over those of the machine, and executes the command that follows.
const SETUP: &str = "ip link set lo up &&
    mount --bind \"$MODELRELAY_TEST_NAMESPACE/hosts\" /etc/hosts &&
    mount --bind \"$MODELRELAY_TEST_NAMESPACE/resolv.conf\" /etc/resolv.conf &&
    mount --bind \"$MODELRELAY_TEST_NAMESPACE/nsswitch.conf\" /etc/nsswitch.conf &&
    exec \"$@\"";

/// The namespace that the test runs in.
#[derive(Debug)]
pub struct Namespace {
    dir: PathBuf,
}

impl Namespace {
    /// Sets the addresses of `relays.test`.
    pub fn set_addresses(&self, addresses: &[&str]) {
        let lines: String = addresses.iter().map(|address| format!("{address} relays.test\n")).collect();
        // In place: a file that is mounted over another one keeps its inode.
        std::fs::write(self.dir.join("hosts"), format!("127.0.0.1 localhost\n{lines}")).expect("the hosts file");
    }

    /// A folder that ends with the test.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Adds a network without hosts: packets to 10.9.9.9 are lost without an error.
    pub async fn add_dead_network(&self) {
        for words in [
            "link add dead type veth peer name void",
            "address add 10.9.9.1/24 dev dead",
            "link set dead up",
            "link set void up",
            "neighbour add 10.9.9.9 lladdr 02:00:00:00:00:09 dev dead",
        ] {
            ip(words).await;
        }
    }

    /// Cuts or restores the loopback device: packets are lost without an error.
    pub async fn set_network(&self, up: bool) {
        ip(if up { "link set lo up" } else { "link set lo down" }).await;
    }
}

async fn ip(words: &str) {
    let set = Command::new("ip").args(words.split(' ')).status().await;
    assert!(set.is_ok_and(|status| status.success()), "`ip {words}` failed");
}

/// Runs `body` in namespaces of its own, and returns the output from there. `test` is the test's full name.
///
/// # Panics
/// If the test fails inside.
pub async fn inside<F: Future<Output = ()>>(test: &str, body: impl FnOnce(Namespace) -> F) -> String {
    if let Some(dir) = std::env::var_os(INSIDE) {
        body(Namespace { dir: dir.into() }).await;
        return String::new();
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let files = [
        ("hosts", "127.0.0.1 localhost\n".to_owned()),
        ("resolv.conf", format!("nameserver {RESOLVER}\n")),
        ("nsswitch.conf", "hosts: files dns\n".to_owned()),
    ];
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).expect("a temporary file");
    }
    let enter = |privilege: &[&str], command: &[&str]| {
        let mut unshare = Command::new("unshare");
        unshare.args(privilege).args(["--net", "--mount", "sh", "-c", SETUP, "sh"]);
        unshare.args(command).env(INSIDE, dir.path()).kill_on_drop(true);
        unshare
    };
    // Some machines allow this only to root, some to all users in a user namespace of their own.
    let mut why = String::new();
    let mut privilege = None;
    for candidate in [&[][..], &["--user", "--map-root-user"]] {
        match enter(candidate, &["true"]).output().await {
            Ok(output) if output.status.success() => privilege = privilege.or(Some(candidate)),
            Ok(output) => why = output_text(&output).trim().replace('\n', "; "),
            Err(error) => why = format!("unshare of util-linux: {error}"),
        }
    }
    let Some(privilege) = privilege else {
        cannot_run(&format!("no namespaces here, which need root or user namespaces, and ip: {why}"));
        return String::new();
    };
    let this = std::env::current_exe().expect("the test's own program");
    let this = this.to_string_lossy();
    let output =
        enter(privilege, &[&this, "--exact", test, "--nocapture"]).output().await.expect("unshare was run before");
    let text = output_text(&output);
    assert!(output.status.success() && text.contains("1 passed"), "inside the namespace:\n{text}");
    text
}

fn output_text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}
