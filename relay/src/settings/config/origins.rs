//! The origins of `ALLOWED_ORIGINS`.

use std::str::FromStr;

/// The origins whose pages may read responses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AllowedOrigins {
    /// Only the relay's own.
    #[default]
    None,
    /// All origins.
    Any,
    /// These origins, as browsers write them: `https://chat.example`.
    Listed(Vec<String>),
}

impl AllowedOrigins {
    /// True if pages of this origin are allowed.
    pub fn contains(&self, origin: &str) -> bool {
        match self {
            Self::None => false,
            Self::Any => true,
            Self::Listed(listed) => listed.iter().any(|known| known == origin),
        }
    }
}

impl FromStr for AllowedOrigins {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let listed: Vec<&str> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
        match listed.as_slice() {
            [] => Ok(Self::None),
            ["*"] => Ok(Self::Any),
            _ if listed.iter().all(|origin| is_origin(origin)) => {
                Ok(Self::Listed(listed.iter().map(|origin| origin.to_ascii_lowercase()).collect()))
            }
            _ => Err("*, or origins (scheme, name and port, without a path) such as https://chat.example,http://localhost:3000".to_owned()),
        }
    }
}

fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return false };
    let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
    !scheme.is_empty() && scheme.bytes().all(is_scheme) && !host.is_empty() && host.bytes().all(is_host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_none_any_or_listed() {
        assert_eq!("".parse(), Ok(AllowedOrigins::None));
        assert_eq!("*".parse(), Ok(AllowedOrigins::Any));
        let listed = vec!["https://chat.example".to_owned(), "http://localhost:3000".to_owned()];
        assert_eq!("https://Chat.example, http://localhost:3000".parse(), Ok(AllowedOrigins::Listed(listed)));
        for text in ["chat.example", "https://chat.example/", "https://", "*,https://chat.example", "null"] {
            assert!(text.parse::<AllowedOrigins>().is_err(), "{text}");
        }
    }
}
