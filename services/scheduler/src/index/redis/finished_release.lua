-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- ARGV[1] field of meta
-- Returns the checkpoint and, if there is one, the value of the field.
local found = mark()
if found[2] then
  found[3] = redis.call('HGET', KEYS[1], ARGV[1])
end
return found
