//! The programs' help, completions and manual pages, also for readers that stop before the end.

use std::process::{Command, Stdio};

use modelrelay_harness::process::path_of;

#[test]
fn help_into_closed_pipe_succeeds() {
    for program in ["modelrelay", "modelrelay-relay", "modelrelay-worker"] {
        for words in [&["--help"][..], &["--version"], &["man"], &["completions", "zsh"]] {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(reader);
            let mut command = Command::new(path_of(program));
            let ended = command.args(words).stdin(Stdio::null()).stdout(writer).output().expect("it runs");
            let output = String::from_utf8_lossy(&ended.stderr);
            assert!(ended.status.success() && output.is_empty(), "{program} {words:?}: {}: {output}", ended.status);
        }
    }
}

const PROGRAMS: [&str; 4] = ["modelrelay", "modelrelay-relay", "modelrelay-worker", "modelrelay-operator"];

/// Returns the output of a program that succeeds.
fn printed(program: &str, args: &[&str]) -> String {
    let mut command = Command::new(path_of(program));
    let ended = command.env_clear().args(args).stdin(Stdio::null()).output().expect("it runs");
    assert!(ended.status.success() && ended.stderr.is_empty(), "{program} {args:?}: {ended:?}");
    String::from_utf8(ended.stdout).expect("the output is UTF-8")
}

/// Returns the words that bash would propose.
fn proposed(program: &str, words: &[&str]) -> Vec<String> {
    let script = printed(program, &["completions", "bash"]);
    let line = format!("{script}\nCOMP_WORDS=({program} {}); COMP_CWORD={}\n", words.join(" "), words.len());
    let last = words.last().copied().unwrap_or_default();
    let call = format!(
        "set -- $(complete -p {program}); while [ \"$1\" != -F ]; do shift; done; $2 {program} '{last}' {program}"
    );
    let line = format!("{line}{call}; printf '%s\\n' \"${{COMPREPLY[@]}}\"");
    let ended = Command::new("bash").args(["-c", &line]).output().expect("bash");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    String::from_utf8_lossy(&ended.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_flags() {
    assert_eq!(proposed("modelrelay-worker", &["con"]), ["connect", "convert"]);
    assert_eq!(proposed("modelrelay-worker", &["connect", "--worker-n"]), ["--worker-name"]);
    assert!(proposed("modelrelay-worker", &["super"]).concat().is_empty(), "a hidden command must not be completed");
    assert_eq!(proposed("modelrelay-relay", &["keys", "cr"]), ["create"]);
    assert_eq!(proposed("modelrelay", &["worker", "con"]), ["connect", "convert"]);
    assert_eq!(proposed("modelrelay", &["up", "--backend-u"]), ["--backend-url"]);
    assert_eq!(proposed("modelrelay-operator", &["crds", "--ref"]), ["--reference"]);
}

#[test]
fn every_shell_has_script_and_command_has_page() {
    for program in PROGRAMS {
        for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
            assert!(printed(program, &["completions", shell]).contains("completions"), "{program} {shell}");
        }
        let help = printed(program, &["--help"]);
        let (_, rest) = help.split_once("Commands:\n").expect("a list of commands");
        let (commands, _) = rest.split_once("\n\n").expect("its end");
        let first_words = commands.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        let names: Vec<&str> = first_words.filter_map(|line| line.split_whitespace().next()).collect();
        let page = printed(program, &["man"]);
        let folder = tempfile::tempdir().expect("a temporary directory");
        printed(program, &["man", "--write", folder.path().to_str().expect("a path of text")]);
        assert!(names.contains(&"completions") && names.contains(&"man"), "{names:?}");
        for name in names.into_iter().filter(|name| *name != "help") {
            assert!(page.contains(&format!("{program}-{name}(1)").replace('-', "\\-")), "{program} {name}: {page}");
            assert!(folder.path().join(format!("{program}-{name}.1")).is_file(), "{program} {name}");
        }
        assert_eq!(std::fs::read_to_string(folder.path().join(format!("{program}.1"))).expect("a page"), page);
    }
}
