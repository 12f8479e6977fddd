"""What everything else knows: errors, units, the facts (``spec``) and the one reader of files (``files``). No torch."""
