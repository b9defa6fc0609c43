//! The command lines of `fake-engine`, which plays SGLang, and vLLM with the failures that a CPU does not show. Its behaviour is in
//! `src/bin/fake-engine`.

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// vLLM with sleep mode and developer mode.
    Vllm,
    /// SGLang with the memory saver.
    Sglang,
}

/// A command line of the fake.
#[derive(Clone, Debug)]
pub struct Fake(Vec<String>);

impl Fake {
    /// `program`: the built fake. It says that it serves `model`, on `port`.
    #[must_use]
    pub fn new(program: &str, kind: Kind, model: &str, port: &str) -> Self {
        let kind = match kind {
            Kind::Vllm => "vllm",
            Kind::Sglang => "sglang",
        };
        Self([program, kind, model, port].map(str::to_owned).to_vec())
    }

    /// With one of the defects that the fake knows.
    #[must_use]
    pub fn with(mut self, defect: &str) -> Self {
        self.0.push(defect.to_owned());
        self
    }

    /// The command.
    #[must_use]
    pub fn command(self) -> Vec<String> {
        self.0
    }
}
