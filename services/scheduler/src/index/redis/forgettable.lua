-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets
-- ARGV[1] now, ms  [2] limit
-- Returns the checkpoint and, if there is one, the ids.
local found = mark()
if found[1] then
  for i, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])) do
    found[2 + i] = id
  end
end
return found
