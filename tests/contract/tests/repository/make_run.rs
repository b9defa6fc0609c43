//! `make run` without the build: stand-ins for cargo and for the program that it builds.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Builds a program that prints its command line.
const CARGO: &str = r#"#!/bin/sh
echo "cargo $*"
mkdir -p "$CARGO_TARGET_DIR/debug"
printf '#!/bin/sh\necho "program $*"\n' > "$CARGO_TARGET_DIR/debug/modelrelay"
chmod +x "$CARGO_TARGET_DIR/debug/modelrelay"
"#;

#[test]
fn make_run_builds_one_program_and_runs_up() {
    let tools = tools(&[("cargo", CARGO), ("cc", "")]);
    let printed = text(&run(&tools).stdout);
    let lines: Vec<&str> = printed.lines().collect();
    let build = "cargo build --locked -p modelrelay-all-in-one --no-default-features";
    assert_eq!(lines[1..], [build, "program up"], "{printed}");
}

#[test]
fn missing_tools_are_named_with_their_remedy() {
    for (tools, line) in [
        (tools(&[]), "make run: cargo is missing: install Rust from https://rustup.rs, then run `make run` again\n"),
        (
            tools(&[("cargo", CARGO)]),
            "make run: a C compiler is missing (Debian, Ubuntu: apt-get install gcc; macOS: xcode-select --install)\n",
        ),
        (tools(&[("cargo", "#!/bin/sh\nexit 1\n"), ("cc", "")]), "make run: the build failed\n"),
    ] {
        let ended = run(&tools);
        assert_eq!((ended.status.code(), text(&ended.stderr).as_str()), (Some(1), line));
    }
}

/// Runs the script of `make run` with these tools and the few system tools that it needs.
fn run(tools: &TempDir) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/run");
    let mut command = Command::new("/bin/bash");
    command.arg(script).env_clear().env("PATH", tools.path()).env("HOME", tools.path());
    command.env("CARGO_TARGET_DIR", tools.path()).output().expect("bash runs it")
}

/// Creates a folder with these programs, and with the system tools that stand-ins and script call.
fn tools(programs: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in programs {
        let file = folder.path().join(name);
        fs::write(&file, text).expect("a program");
        fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).expect("its mode");
    }
    for name in ["dirname", "mkdir", "chmod"] {
        let of_system =
            ["/usr/bin", "/bin"].map(|bin| Path::new(bin).join(name)).into_iter().find(|file| file.exists());
        std::os::unix::fs::symlink(of_system.expect("a usual program"), folder.path().join(name)).expect("a link");
    }
    folder
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
