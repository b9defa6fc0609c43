//! The command lines of `fake-engine`, which simulates SGLang, and vLLM with the failures that do not occur on a CPU.
//! Its behaviour is in `src/bin/fake-engine`.

/// The simulated engine.
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
    /// Creates the command. `program` is the built fake; it serves `model` on `port`.
    #[must_use]
    pub fn new(program: &str, kind: Kind, model: &str, port: &str) -> Self {
        let kind = match kind {
            Kind::Vllm => "vllm",
            Kind::Sglang => "sglang",
        };
        Self([program, kind, model, port].map(str::to_owned).to_vec())
    }

    /// Adds one of the fake's defects.
    #[must_use]
    pub fn with(mut self, defect: &str) -> Self {
        self.0.push(defect.to_owned());
        self
    }

    /// Returns the command.
    #[must_use]
    pub fn command(self) -> Vec<String> {
        self.0
    }
}
