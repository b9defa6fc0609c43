//! The instructions printed at the end, in the syntax of the shell that they are pasted into.

use modelrelay_platform::own_program;

use crate::app::shell::Shell;

fn unset(shell: Shell, variables: &[String]) -> String {
    match shell {
        Shell::Posix => format!("unset {}", variables.join(" ")),
        Shell::PowerShell => {
            let variables: Vec<String> = variables.iter().map(|variable| format!("Env:{variable}")).collect();
            format!("Remove-Item {}", variables.join(", "))
        }
    }
}

fn program(shell: Shell) -> String {
    let words = own_program::selector().map_or_else(String::new, |word| format!(" {word}"));
    let name = if words.is_empty() { "modelrelay-worker" } else { "modelrelay" };
    match shell {
        Shell::Posix => format!("{name}{words}"),
        Shell::PowerShell => format!(r".\{name}.exe{words}"),
    }
}

/// Returns how to unset the variables that conflict with this file, and how to run it.
pub(super) fn next(file: &str, in_the_way: &[String], shell: Shell) -> String {
    let unset = match in_the_way {
        [] => String::new(),
        some => format!(
            "\nEnvironment variables take precedence over {file}. Unset them first:\n\n  {}\n",
            unset(shell, some)
        ),
    };
    format!("{unset}\nThen run the worker:\n\n  {} --config {}\n", program(shell), shell.word(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_steps_use_syntax_of_each_shell() {
        let set = ["PROXY_URL".to_owned(), "WORKER_SECRET".to_owned()];
        assert_eq!(
            next("worker.yaml", &set, Shell::Posix),
            "\nEnvironment variables take precedence over worker.yaml. Unset them first:\n\n  \
            unset PROXY_URL WORKER_SECRET\n\nThen run the worker:\n\n  modelrelay-worker --config worker.yaml\n"
        );
        assert_eq!(
            next("worker.yaml", &set, Shell::PowerShell),
            "\nEnvironment variables take precedence over worker.yaml. Unset them first:\n\n  \
            Remove-Item Env:PROXY_URL, Env:WORKER_SECRET\n\nThen run the worker:\n\n  .\\modelrelay-worker.exe --config worker.yaml\n"
        );
        assert_eq!(
            next("a/b.yaml", &[], Shell::Posix),
            "\nThen run the worker:\n\n  modelrelay-worker --config a/b.yaml\n"
        );
    }
}
