//! systemd units: systemd accepts them, a stop drains, and the programs know their settings.

use std::path::Path;
use std::process::Command;

use modelrelay_harness::cannot_run;
use modelrelay_harness::process::{on_path, path_of};

use crate::{deployed, replaced};

const UNITS: [(&str, &str); 2] =
    [("modelrelay-relay.service", "modelrelay-relay"), ("modelrelay-worker@.service", "modelrelay-worker")];

#[test]
fn systemd_understands_every_line() {
    let Some(analyze) = on_path("systemd-analyze") else { return cannot_run("systemd-analyze is not installed") };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let complaints = |unit: &Path| {
        let verified = Command::new(&analyze).args(["verify", "--man=no"]).arg(unit).output().expect("it starts");
        let output = String::from_utf8_lossy(&verified.stderr).into_owned();
        output.lines().filter(|line| line.contains("modelrelay")).map(str::to_owned).collect::<Vec<_>>()
    };
    // Verifies that it reports errors at all.
    let wrong = folder.path().join("modelrelay-wrong.service");
    std::fs::write(&wrong, "[Service]\nExecStart=/bin/true\nNoSuchKey=1\n").expect("the folder is writable");
    assert!(complaints(&wrong).iter().any(|line| line.contains("NoSuchKey")), "{:?}", complaints(&wrong));
    for (unit, program) in UNITS {
        let built = path_of(program).display().to_string();
        let text = replaced(deployed(&format!("systemd/{unit}")), &[(&format!("/usr/local/bin/{program}"), built)]);
        // A template is checked as one of its instances.
        let unit = folder.path().join(unit.replace('@', "@vllm"));
        std::fs::write(&unit, text).expect("the folder is writable");
        assert_eq!(complaints(&unit), Vec::<String>::new());
    }
}

#[test]
fn every_variable_is_known_and_stop_drains() {
    for ((unit, program), file) in UNITS.into_iter().zip(["relay.env", "worker.env"]) {
        let help = Command::new(path_of(program)).arg("--help").output().expect("it is built");
        // Independent of the line width.
        let help = String::from_utf8_lossy(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        let unit = deployed(&format!("systemd/{unit}"));
        let of_file = deployed(&format!("systemd/{file}"));
        let set = unit.lines().filter_map(|line| line.strip_prefix("Environment="));
        let set = set.chain(of_file.lines().filter(|line| !line.starts_with('#') && !line.is_empty()));
        for assignment in set {
            let name = assignment.split('=').next().unwrap_or_default();
            // Secret values are not shown.
            let is_known = ["=", "]"].iter().any(|end| help.contains(&format!("[env: {name}{end}")));
            assert!(is_known, "{program} knows no {name}");
        }
        let stop = unit.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")?.parse::<u32>().ok());
        assert!(unit.contains("KillSignal=SIGTERM") && stop.is_some_and(|seconds| seconds > 600), "{stop:?}");
    }
}
